"""to_hf_weights.py and from_hf_weights.py, as a user runs them."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from support import commands
from support import hf_folders as hf

from mesh_transformer.checkpoint.hf.source import HFSource
from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.open import Checkpoint

# some megabytes, so that the commands log their progress
SIZES = {
    **hf.ODD,
    "d_model": 192,
    "n_heads": 4,
    "n_vocab": 132,
}
MODEL = hf.model_config(**SIZES)
CONFIG = {"model": SIZES, "data": {"tokenizer": "gpt2"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with config.json, a config of this program, and `hf`, a random model as a Hugging Face folder."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_hf(hf.MemorySource(hf.random_params(MODEL)), MODEL, str(tmp_path / "hf"))
    return tmp_path


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def assert_same_weights(found: Path | str, expected: Path | str) -> None:
    actual, wanted = (hf.read_all(Checkpoint.open(str(path)).source(MODEL)) for path in (found, expected))
    assert actual.keys() == wanted.keys()
    for name, array in wanted.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


def from_hf(cwd: Path, *arguments: str, code: int = 0) -> str:
    return commands.run("from_hf_weights.py", *arguments, cwd=cwd, code=code)[1]


def to_hf(cwd: Path, *arguments: str, code: int = 0) -> str:
    arguments = ("--config", "config.json", *arguments)
    return commands.run("to_hf_weights.py", *arguments, cwd=cwd, code=code)[1]


@pytest.mark.parametrize("format", ["native", "classic"])
def test_round_trip_of_a_folder(folder, format) -> None:
    output = "run/step_0" if format == "classic" else "run"
    more = ["--format", format] + (["--shards", "4"] if format == "classic" else [])
    log = from_hf(folder, "--input", "hf", "--output-path", output, *more)
    assert "MB/s" in log
    assert re.search(r" I hf: gptj, layers \d+, d_model 192, [^{}']*$", log, re.MULTILINE)
    assert_same_weights(folder / "run/step_0", folder / "hf")
    if format == "classic":
        assert len(list((folder / "run/step_0").glob("shard_*/*.npz"))) == 4 * 16
        assert json.loads((folder / "run/meta.json").read_text())["checkpoints"] == [0]
    else:
        assert_same_weights(folder / "run", folder / "hf")
    log = to_hf(folder, "--input-ckpt", "run/step_0", "--output-path", "back", "--dtype", "fp32")
    assert "MB/s" in log
    assert tree(folder / "back") == tree(folder / "hf")


def test_a_run_is_written_in_half_precision_unless_a_dtype_is_given(folder) -> None:
    """The original program's options --cpu and --debug are accepted."""
    write_native(HFSource(str(folder / "hf"), MODEL), str(folder / "run"), model=MODEL)
    log = to_hf(folder, "--input-ckpt", "run", "--output-path", "half", "--cpu", "--debug")
    assert "the weights are written in float16, the default for a native checkpoint; choose another with --dtype" in log
    assert "lm_head.weight (132, 192) float16, from params/head/logits/w" in log
    half, whole = (hf.read_all(HFSource(str(folder / name))) for name in ("half", "hf"))
    for name, array in whole.items():
        np.testing.assert_array_equal(half[name], array.astype(np.float16), err_msg=name)
    log = to_hf(folder, "--input-ckpt", "hf", "--output-path", "same")
    assert "the weights are written in float32, the stored dtype; choose another with --dtype" in log
    assert "from params/" not in log
    assert tree(folder / "same") == tree(folder / "hf")


def test_dtype_and_tokenizer(folder, texts) -> None:
    tokenizer = str(texts / "gpt2_tokenizer")
    to_hf(folder, "--input-ckpt", "hf", "--output-path", "half", "--dtype", "fp16")
    assert {str(i.dtype) for i in HFSource(str(folder / "half")).tensors.values()} == {"float16"}
    errors = to_hf(folder, "--input-ckpt", "hf", "--output-path", "no", "--tokenizer", tokenizer, code=2)
    assert "ends a text with the token 50256, but model.n_vocab is 132" in errors
    errors = to_hf(folder, "--input-ckpt", "hf", "--output-path", "no", "--tokenizer", "bytes", code=2)
    assert "ends a text with the token 256, but model.n_vocab is 132" in errors
    assert not (folder / "no").exists()

    large = hf.model_config(n_vocab=50400, layers=1, d_model=8, n_heads=1)
    write_hf(hf.MemorySource(hf.random_params(large)), large, str(folder / "large"))
    sets = [f"model.{name}={getattr(large, name)}" for name in ("n_vocab", "layers", "d_model", "n_heads")]
    sets = [part for value in sets for part in ("--set", value)]
    to_hf(folder, *sets, "--input-ckpt", "large", "--output-path", "new", "--tokenizer", tokenizer)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder / "new").encode("hello") == [31373]
    assert json.loads((folder / "new/config.json").read_text())["eos_token_id"] == 50256
    hf.transformers_logits(folder / "new", np.array([[1, 2]]))


def test_existing_output_is_not_changed(folder) -> None:
    for name in ("run/step_0", "back"):
        (folder / name).mkdir(parents=True)
        (folder / name / "mine").write_text("mine")
    before = tree(folder)
    assert "--overwrite" in from_hf(folder, "--input", "hf", "--output-path", "run", code=2)
    classic = ["--output-path", "run/step_0", "--format", "classic"]
    assert "holds mine" in from_hf(folder, "--input", "hf", *classic, "--overwrite", code=2)
    # two models in one folder: every reader would take the native one
    message = from_hf(folder, "--input", "hf", "--output-path", "hf", code=2)
    assert re.search(r"hf holds a Hugging Face model \(model\.safetensors\).*give a folder of its own", message)
    assert "holds mine" in to_hf(folder, "--input-ckpt", "hf", "--output-path", "back", "--overwrite", code=2)
    assert tree(folder) == before
    (folder / "back/mine").unlink()
    shutil.copytree(folder / "hf", folder / "back", dirs_exist_ok=True)
    assert "--overwrite" in to_hf(folder, "--input-ckpt", "hf", "--output-path", "back", code=2)
    to_hf(folder, "--input-ckpt", "hf", "--output-path", "back", "--overwrite")
    from_hf(folder, "--input", "hf", "--output-path", "run", "--overwrite")
    assert tree(folder / "back") == tree(folder / "hf")
    assert_same_weights(folder / "run", folder / "hf")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["--input", "nothing", "--output-path", "new"],
            "nothing is not a Hugging Face folder",
        ),
        (["--input", "hf", "--output-path", "new", "--shards", "2"], "--shards must be 1 or more"),
        (
            ["--input", "hf", "--output-path", "new", "--format", "classic", "--shards", "0"],
            "--shards must be 1 or more",
        ),
        (["--input", "hf", "--output-path", "new", "--format", "classic", "--shards", "7"], "7"),
        (["--input", "hf", "--output-path", "config.json", "--format", "classic"], "config.json is a file"),
    ],
)
def test_bad_input_is_one_line(folder, arguments, reason) -> None:
    before = tree(folder)
    errors = from_hf(folder, *arguments, code=2)
    assert reason in errors
    assert "Traceback" not in errors
    assert tree(folder) == before


def test_bad_checkpoints_leave_nothing_behind(folder) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "model.layers: the config has 5" in to_hf(
        folder, "--set", "model.layers=5", "--input-ckpt", "hf", "--output-path", "new", code=2
    )
    assert "model.pe is t5" in to_hf(
        folder, "--set", "model.pe=t5", "--input-ckpt", "hf", "--output-path", "new", code=2
    )
    weights = folder / "hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    errors = to_hf(folder, "--input-ckpt", "hf", "--output-path", "new", code=2)
    assert "truncated" in errors
    assert "Traceback" not in errors
    assert {path.name for path in folder.iterdir()} - {"cache"} == {"config.json", "hf"}
    assert config == CONFIG
