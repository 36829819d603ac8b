"""slim_model.py and resharding_example.py as a user runs them."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import commands
import pytest
from classic_folders import TINY, model_config, stored, write

from mesh_transformer.checkpoint.classic import ClassicSource


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
    assert source.form == (2, False)
    assert {str(info.dtype) for info in source.tensors.values()} == {dtype}
    assert source.extra["aux"]["train_loader"]["used"] == 3
    assert "MB/s" in errors
    assert sorted(path.name for path in run.iterdir() if path.is_dir() and path.name != "cache") == [
        "run",
        folder,
    ]


def test_slim_model_leaves_what_is_there(run):
    (run / "run_slim/step_7").mkdir(parents=True)
    (run / "run_slim/step_7/notes").write_text("mine")
    _, errors = commands.run("slim_model.py", "--config", "config.json", cwd=run, code=2)
    assert (
        errors.splitlines()[-1].startswith("error: run_slim/step_7 is there already")
        or "is there already" in errors
    )
    assert [path.name for path in (run / "run_slim").rglob("*")] == ["step_7", "notes"]
    commands.run("slim_model.py", "--config", "config.json", "--overwrite", cwd=run)
    assert not (run / "run_slim/step_7/notes").exists()


def test_slim_model_without_that_step(run):
    _, errors = commands.run("slim_model.py", "--config", "config.json", "--ckpt-step", "8", cwd=run, code=2)
    assert errors.splitlines()[-1] == "error: no classic checkpoint of step 8 in run: there are [7]"
    assert "Traceback" not in errors


def test_resharding_there_and_back(run):
    arguments = ["--config", "config.json", "--ckpt"]
    commands.run(
        "resharding_example.py", *arguments, "run", "--shards-out", "1", "--out", "one/step_7", cwd=run
    )
    assert json.loads((run / "one/meta.json").read_text())["step"] == 7
    commands.run(
        "resharding_example.py", *arguments, "one/step_7", "--shards-out", "2", "--out", "back", cwd=run
    )
    assert stored(run / "back") == stored(run / "run/step_7")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shards-out", "3", "--out", "out"], "model.n_heads 4 is not divisible by mesh.tp 3"),
        (
            ["--shards-out", "1", "--out", "out", "--set", "model.layers=3"],
            "found 81; a full checkpoint of 2 layers has as many",
        ),
        (["--shards-out", "1"], "nothing to do"),
        (["--shards-out", "1", "--out", "run"], "is there already"),
    ],
)
def test_resharding_that_cannot_be(run, arguments, message):
    before = sorted(run.rglob("*"))
    command = ["resharding_example.py", "--config", "config.json", "--ckpt", "run", *arguments]
    _, errors = commands.run(*command, cwd=run, code=2)
    assert message in errors
    assert "Traceback" not in errors
    assert [path for path in sorted(run.rglob("*")) if "cache" not in path.parts] == before


def test_a_killed_conversion_leaves_no_folder_and_can_be_repeated(run):
    """Killed in the middle: what the next run finds under the temporary name goes."""
    shutil.rmtree(run / "run")
    write(run / "run/step_7", 2, full=True, d_model=384, layers=4)
    config = {**TINY, "d_model": 384, "layers": 4, "model_dir": "run"}
    (run / "config.json").write_text(json.dumps(config))
    arguments = ["--config", "config.json", "--ckpt", "run", "--shards-out", "1", "--out", "out"]
    process = commands.start("resharding_example.py", *arguments, cwd=run)
    deadline = time.monotonic() + 60
    while not (run / ".out.mtj-partial/shard_0/1.npz").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (run / ".out.mtj-partial").is_dir()
    assert not (run / "out").exists()
    _, errors = commands.run("resharding_example.py", *arguments, cwd=run)
    assert "cut short" in errors
    assert not (run / ".out.mtj-partial").exists()
    ClassicSource(str(run / "out"), model_config(d_model=384, layers=4))
