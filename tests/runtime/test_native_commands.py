"""The commands with native steps that a conversion wrote, and with damaged ones."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.classic_folders import RandomSource
from support.commands import metrics, run, write_run

from mesh_transformer.checkpoint.classic.source import ClassicSource
from mesh_transformer.checkpoint.native.source import NativeSource
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.config import load_config
from mesh_transformer.data.records.tfrecords import write_records


def test_a_flipped_bit_is_not_converted(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    source = RandomSource(load_config(str(config)).model, full=True)
    step = Path(write_native(source, str(tmp_path / "run")))
    arguments = ["--config", "config.json", "--input-ckpt", "run", "--output-path", "hf"]
    needle = source.read("params/blocks/ff/in/w", (slice(1, 2), slice(3, 5), slice(0, 128))).tobytes()
    (file,) = [path for path in (step / "state/d").iterdir() if needle in path.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(needle) + 101] ^= 32
    file.write_bytes(content)
    _, errors = run("to_hf_weights.py", *arguments, cwd=tmp_path, code=2)
    assert "step_7 is damaged" in errors or "run is damaged" in errors
    assert "wrong checksum of params/blocks/ff/in/w" in errors
    assert "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == [
        "config.json",
        "run",
        "text.txt",
    ]


def classic_run(folder: Path, original: Path) -> dict[str, np.ndarray]:
    """Write config.json and the data of the golden run, and `run`, its step 5 converted to native; return the next
    step."""
    config = json.loads((original / "configs/tiny_mp8.json").read_text())
    data = {"train_set": "text.tfrecords", "val_set": {}, "model_dir": "run", "total_steps": 6}
    (folder / "config.json").write_text(json.dumps({**config, **data}))
    golden = [np.load(original / f"mp8/f32/{name}.npz") for name in ("train", "resume_from_step5")]
    records = np.concatenate([file["tokens"].reshape(-1, 65) for file in golden])
    write_records(str(folder / "text.tfrecords"), records.astype(np.int32))
    shutil.copytree(original / "mp8/ckpt_full", folder / "old")
    aux = {"5": {"train_loader": {"used": [], "file_idx": 4}}}
    (folder / "old/meta.json").write_text(json.dumps({"step": 5, "checkpoints": [5], "aux": aux}))
    model = load_config(str(folder / "config.json")).model
    write_native(ClassicSource(str(folder / "old/step_5"), model), str(folder / "run"))
    return {key: golden[1][key] for key in ("tokens", "loss")}


def test_a_converted_run_of_2021_resumes(tmp_path: Path, original: Path) -> None:
    """The next step has the original's loss, so parameters, moments, schedule and data position are right."""
    expected = classic_run(tmp_path, original)
    # ignored when a run resumes
    start = ["--tune-model-path", "old"]
    _, errors = run("device_train.py", "--config", "config.json", *start, cwd=tmp_path, devices=8)
    assert "resuming this run: --tune-model-path is used at the first start only" in errors
    (record,) = metrics(tmp_path / "run")
    assert record["step"] == 6
    assert record["train/loss"] == pytest.approx(expected["loss"][0], abs=1e-5)
    state = NativeSource(str(tmp_path / "run/step_6"))
    assert state.counts == (6, 6, 6)
    tokens_per_step = expected["tokens"][0, ..., 1:].size
    assert state.extra["counters"] == {"tokens": 6 * tokens_per_step, "steps_redone": 0}


def test_a_classic_run_logs_that_tune_model_path_is_not_read(tmp_path: Path, original: Path) -> None:
    classic_run(tmp_path, original)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "old").rename(tmp_path / "run")
    arguments = ["--config", "config.json", "--set", "total_steps=5", "--tune-model-path", "nowhere"]
    _, errors = run("device_train.py", *arguments, cwd=tmp_path, devices=8)
    assert "resuming this run: --tune-model-path is used at the first start only" in errors
    assert "the run is complete: step 5 of 5" in errors


def test_a_run_does_not_resume_from_parameters_without_moments(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    write_native(RandomSource(load_config(str(config)).model, full=False), str(tmp_path / "run"))
    before = sorted((tmp_path / "run").rglob("*"))
    _, errors = run("device_train.py", "--config", "config.json", cwd=tmp_path, code=2)
    assert "step_7 has no Adam moments" in errors
    assert "--tune-model-path" in errors
    assert "another checkpoint.model_dir" in errors
    assert "Traceback" not in errors
    own_files = {"run_id", "run.lock"}
    assert sorted(path for path in (tmp_path / "run").rglob("*") if path.name not in own_files) == before
