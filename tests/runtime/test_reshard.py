"""resharding_example.py: refused arguments, and completion of a prompt with the result."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from support import commands
from support.classic_folders import TINY, RandomSource, model_config, stored

from mesh_transformer import logs
from mesh_transformer.checkpoint.classic.writer import write_classic
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.convert import reshard

SIZES = {**TINY, "n_vocab": 260, "cores_per_replica": 2}
BYTES = "data.tokenizer=bytes"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """config.json, and one model as run/step_7 (classic, two shards, full) and native/step_7."""
    monkeypatch.chdir(tmp_path)
    # keeps the log handlers of the test session
    monkeypatch.setattr(logs, "set_up", lambda *_: None)
    model = model_config(**SIZES)
    source = RandomSource(model, full=True)
    write_classic(source, model, "run/step_7", 2)
    write_native(source, "native")
    Path("config.json").write_text(json.dumps(SIZES))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "overrides", "message"),
    [
        ({"shards_out": 0}, [], "--shards-out 0: must be 1 or more"),
        ({"shards_out": -2}, [], "--shards-out -2: must be 1 or more"),
        ({"shards_out": 3}, [],
         "out: 3 shards do not divide model.n_heads 4 and model.n_vocab 260: possible are 1, 2, 4"),
        ({}, ["model.n_vocab=261", "model.n_heads=2"], "out: 2 shards do not divide .* possible are 1$"),
        ({"shards_out": 1}, ["mesh.tp=1"], "set the same value"),
        ({"shards_out": 1}, ["data.seed=1", " cores_per_replica = 2"], "set the same value"),
        ({"shards_out": 1}, ["tp=1", "early_cast=true"], "set the same value"),
        ({"shards_out": 1, "format": "native"}, [], "a native checkpoint has no shards"),
        ({"format": "native", "output": "new/step_7"}, [], "give the root, new; step_7 is created in it"),
        ({"format": "native", "checkpoint": "native"}, [], "native/step_7 is already native"),
        ({"format": "Hugging Face"}, [], "format Hugging Face: a step is written as native or classic"),
        ({"output": "new/step_8"}, [], "this is step 7, give a path that ends in step_7"),
        ({"output": "native/step_7/"}, [], "exists already"),
        ({"output": "native", "format": "native"}, [], "native/step_7 exists already"),
        ({"prompt": "abcdefgh"}, [BYTES], "the prompt has 8 tokens; .* exceeds the context of 8"),
        ({"prompt": ""}, [BYTES], "the prompt is empty"),
        ({"prompt": "a"}, ["data.tokenizer=./nowhere"], "no such tokenizer folder: ./nowhere"),
        ({"prompt": "a"}, [BYTES, "mesh.dp=8"], "mesh.dp 8 x mesh.tp 2 = 16 devices, found 8"),
        ({"prompt": "a", "output": None, "shards_out": 3}, [BYTES], "3 shards needs a multiple of 3 devices, found 8"),
        ({"output": None}, [], "nothing to do"),
        ({"checkpoint": "elsewhere"}, [], "no checkpoint in elsewhere"),
    ],
)  # fmt: skip
def test_refused_before_anything_is_written(
    folder: Path, arguments: dict[str, Any], overrides: list[str], message: str
) -> None:
    before = sorted(folder.rglob("*"))
    defaults = {
        "checkpoint": "run",
        "shards_out": None,
        "output": "out",
        "format": "classic",
        "prompt": None,
    }
    with pytest.raises(UserError, match=message):
        reshard("config.json", overrides, **{**defaults, **arguments})
    assert sorted(folder.rglob("*")) == before


def test_a_prompt_needs_as_many_devices_as_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(UserError, match="2 shards needs a multiple of 2 devices, found 1: give --shards-out 1"):
        reshard(
            "config.json",
            [BYTES],
            checkpoint="run",
            shards_out=2,
            output="out",
            format="classic",
            prompt="a",
        )
    assert not (folder / "out").exists()


def test_a_round_trip_is_equal(folder: Path) -> None:
    """Classic in two shards to native and back, with moments and counts. The config sets the number of shards."""
    for checkpoint, out, format in (("run", "new", "native"), ("new", "back/step_7", "classic")):
        reshard("config.json", [], checkpoint=checkpoint, shards_out=None, output=out, format=format, prompt=None)
    assert stored(folder / "back/step_7") == stored(folder / "run/step_7")
    assert len(stored(folder / "run/step_7")) == 2 * 81
    assert json.loads((folder / "back/meta.json").read_text()) == {
        "step": 7, "checkpoints": [7], "aux": {"7": {}},
    }  # fmt: skip


def test_the_result_completes_a_prompt(folder: Path) -> None:
    common = ["--config", "config.json", "--set", BYTES, "--prompt", "ab"]
    drawn = ("--set", "mesh.tp=1", "--ckpt", "run", "--seed", "0")
    expected, _ = commands.run("device_sample.py", *common, *drawn, cwd=folder)
    assert expected.startswith("ab")
    assert len(expected) > 4
    for format, root, out in (("classic", "one", "one/step_7"), ("native", "other", "other")):
        arguments = ["--ckpt", "run", "--shards-out", "1", "--out", out, "--format", format]
        found, errors = commands.run("resharding_example.py", *common, *arguments, cwd=folder)
        assert found == expected
        assert f"step 7 from {root}/step_7" in errors
