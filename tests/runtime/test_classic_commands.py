"""The commands slim_model.py and resharding_example.py."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import pytest
from support import commands
from support.classic_folders import TINY, RandomSource, model_config, stored, values, write

from mesh_transformer.checkpoint.classic.source import ClassicSource
from mesh_transformer.checkpoint.native.writer import write_native


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A root with one full checkpoint of two shards, and its config."""
    write(tmp_path / "run/step_7", 2, full=True)
    meta = {"step": 7, "checkpoints": [7], "aux": {"7": {"train_loader": {"file_idx": 1, "used": 3}}}}
    (tmp_path / "run/meta.json").write_text(json.dumps(meta))
    config = {**TINY, "cores_per_replica": 2, "model_dir": "run"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "folder", "dtype"),
    [([], "run_slim", "bfloat16"), (["--ckpt-step", "7", "--f16"], "run_slim_f16", "float16")],
)
def test_slim_model(run, arguments, folder, dtype):
    _, errors = commands.run("slim_model.py", "--config", "config.json", *arguments, cwd=run)
    source = ClassicSource(str(run / folder / "step_7"), model_config())
    assert source.contents == (2, False)
    assert {str(info.dtype) for info in source.tensors.values()} == {dtype}
    assert source.extra["aux"]["train_loader"]["used"] == 3
    assert "MB/s" in errors
    assert sorted(path.name for path in run.iterdir() if path.is_dir() and path.name != "cache") == [
        "run",
        folder,
    ]


def test_slim_model_of_a_native_run(run):
    """Of one step of several, in the config's number of shards."""
    for step in (7, 9):
        source = RandomSource(model_config(), full=True, seed=step)
        source.counts = source.counts._replace(step=step)
        folder = write_native(source, str(run / f"alone_{step}"))
        shutil.copytree(folder, run / f"ours/step_{step}")
    options = ["--set", "checkpoint.model_dir=ours", "--ckpt-step", "7"]
    commands.run("slim_model.py", "--config", "config.json", *options, cwd=run)
    slim = ClassicSource(str(run / "ours_slim/step_7"), model_config())
    assert slim.contents == (2, False)
    expected = values(RandomSource(model_config(), full=False, seed=7))
    assert values(slim).keys() == expected.keys()
    for name, array in values(slim).items():
        assert (array == expected[name].astype(ml_dtypes.bfloat16)).all(), name


def test_slim_model_replaces_only_a_checkpoint_and_only_if_asked(run):
    output = run / "run_slim/step_7"
    output.mkdir(parents=True)
    (output / "notes").write_text("mine")
    for options in ([], ["--overwrite"]):
        _, errors = commands.run("slim_model.py", "--config", "config.json", *options, cwd=run, code=2)
        assert "run_slim/step_7 exists already" in errors.splitlines()[-1]
        assert [path.name for path in (run / "run_slim").rglob("*")] == ["step_7", "notes"]
    shutil.rmtree(run / "run_slim")
    commands.run("slim_model.py", "--config", "config.json", cwd=run)
    (output / "shard_0/0.npz").write_bytes(b"damaged")
    commands.run("slim_model.py", "--config", "config.json", "--overwrite", cwd=run)
    assert (output / "shard_0/0.npz").read_bytes() != b"damaged"


def test_slim_model_without_that_step(run):
    _, errors = commands.run("slim_model.py", "--config", "config.json", "--ckpt-step", "8", cwd=run, code=2)
    assert errors.splitlines()[-1] == "error: no checkpoint of step 8 in run: available are [7]"
    assert "Traceback" not in errors


def test_resharding_round_trip(run):
    arguments = ["--config", "config.json", "--ckpt"]
    commands.run("resharding_example.py", *arguments, "run", "--shards-out", "1", "--out", "one/step_7", cwd=run)
    assert json.loads((run / "one/meta.json").read_text())["step"] == 7
    commands.run("resharding_example.py", *arguments, "one/step_7", "--shards-out", "2", "--out", "back", cwd=run)
    assert stored(run / "back") == stored(run / "run/step_7")


def test_another_model_is_one_line(run):
    before = sorted(run.rglob("*"))
    arguments = ["--ckpt", "run", "--shards-out", "1", "--out", "out", "--set", "model.layers=3"]
    _, errors = commands.run("resharding_example.py", "--config", "config.json", *arguments, cwd=run, code=2)
    assert "found 81; a full checkpoint of 2 layers has this number" in errors
    assert "Traceback" not in errors
    assert [path for path in sorted(run.rglob("*")) if "cache" not in path.parts] == before
