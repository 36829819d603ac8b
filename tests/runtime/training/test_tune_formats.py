"""device_train.py and device_sample.py from checkpoints of the original program, against its numbers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.commands import metrics, run
from support.gcs_server import GcsServer

from mesh_transformer.checkpoint.classic.writer import write_classic
from mesh_transformer.checkpoint.native.source import NativeSource
from mesh_transformer.config import load_config
from mesh_transformer.data.records.tfrecords import write_records

# float32 sums in another order than in the original program; the same tolerance as for the trajectory in tests/train
LOSS_RTOL = 1e-4


def prepare(folder: Path, original: Path, *tokens: np.ndarray, shards: int = 1, **values: object) -> None:
    """`config.json` of the golden model, and a training set of (step, accumulation, batch, 65) tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((original / f"configs/tiny_mp{shards}.json").read_text())
    data = {"train_set": "text.tfrecords", "val_set": {}, "model_dir": "run", "ckpt_every": 100}
    (folder / "config.json").write_text(json.dumps({**config, **data, **values}))
    records = np.concatenate([part.reshape(-1, 65) for part in tokens])
    write_records(str(folder / "text.tfrecords"), records.astype(np.int32))


def golden(original: Path, name: str) -> dict[str, np.ndarray]:
    file = np.load(original / f"{name}.npz")
    return {key: file[key] for key in ("tokens", "loss", "last_loss")}


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    return {record["step"]: (record["train/loss"], record["train/last_loss"]) for record in metrics(folder / "run")}


def assert_losses(found: dict[int, tuple[float, float]], expected: dict[str, np.ndarray], *steps: int) -> None:
    assert list(found) == list(steps)
    for step in steps:
        theirs = (expected["loss"][step - 1], expected["last_loss"][step - 1])
        np.testing.assert_allclose(found[step], theirs, rtol=LOSS_RTOL, err_msg=str(step))


def test_a_run_from_eight_shards_is_the_originals_run_of_one(tmp_path: Path, original: Path) -> None:
    """Fine-tune for 3 steps from the 8-shard start, write a classic run with one shard, and resume it for 2 steps."""
    first, second = tmp_path / "first", tmp_path / "second"
    expected = golden(original, "mp1/f32/train")
    prepare(first, original, expected["tokens"], total_steps=3)
    start = str(original / "mp8/ckpt_init/step_0")
    run("device_train.py", "--config", "config.json", "--tune-model-path", start, cwd=first)
    assert_losses(losses(first), expected, 1, 2, 3)

    prepare(second, original, expected["tokens"], total_steps=5)
    model = load_config(str(second / "config.json")).model
    write_classic(NativeSource(str(first / "run/step_3")), model, str(second / "run/step_3"), 1)
    aux = {"3": {"train_loader": {"used": [], "file_idx": 2}}}
    (second / "run/meta.json").write_text(json.dumps({"step": 3, "checkpoints": [3], "aux": aux}))
    _, errors = run("device_train.py", "--config", "config.json", cwd=second)
    assert "resuming a run of the original program" in errors
    assert_losses(losses(second), expected, 4, 5)
    assert sorted(path.name for path in (second / "run").glob("step_*")) == ["step_3", "step_5"]
    assert (second / "run/step_3/shard_0/15.npz").exists()
    _, errors = run("device_train.py", "--config", "config.json", cwd=second)
    assert "the run is complete: step 5 of 5" in errors


def test_a_run_of_2021_goes_on_on_eight_devices(tmp_path: Path, original: Path) -> None:
    before, after = golden(original, "mp8/f32/train"), golden(original, "mp8/f32/resume_from_step5")
    prepare(tmp_path, original, before["tokens"], after["tokens"], shards=8, total_steps=6)
    shutil.copytree(original / "mp8/ckpt_full", tmp_path / "run")
    aux = {"5": {"train_loader": {"used": [], "file_idx": 4}}}
    (tmp_path / "run/meta.json").write_text(json.dumps({"step": 5, "checkpoints": [5], "aux": aux}))
    run("device_train.py", "--config", "config.json", cwd=tmp_path, devices=8)
    (record,) = metrics(tmp_path / "run")
    assert record["step"] == 6
    assert record["train/loss"] == pytest.approx(after["loss"][0], abs=1e-5)
    state = NativeSource(str(tmp_path / "run/step_6"))
    assert state.counts == (6, 6, 6)


@pytest.mark.parametrize(
    "options", [pytest.param([], id="slim"), pytest.param(["--fresh-opt"], id="fresh-opt", marks=pytest.mark.nightly)]
)
def test_no_moments_or_fresh_ones(tmp_path: Path, original: Path, options: list[str]) -> None:
    expected = golden(original, "mp1/f32/train")
    prepare(tmp_path, original, expected["tokens"], total_steps=1)
    source = original / ("mp8/ckpt_full/step_5" if options else "mp8/ckpt_slim_bf16/step_5")
    _, errors = run(
        "device_train.py", "--config", "config.json", "--tune-model-path", str(source), *options, cwd=tmp_path
    )
    assert ("has no Adam moments: they start from zero" in errors) == (not options)
    assert NativeSource(str(tmp_path / "run/step_1")).counts == (1, 1, 1)


def test_moments_are_carried_into_a_fine_tuning_run(tmp_path: Path, original: Path) -> None:
    prepare(tmp_path, original, golden(original, "mp1/f32/train")["tokens"], total_steps=1)
    source = str(original / "mp8/ckpt_full/step_5")
    run("device_train.py", "--config", "config.json", "--tune-model-path", source, cwd=tmp_path)
    assert NativeSource(str(tmp_path / "run/step_1")).counts == (1, 6, 1)  # Adam's count continues


def test_a_slim_run_cannot_go_on(tmp_path: Path, original: Path) -> None:
    prepare(tmp_path, original, golden(original, "mp1/f32/train")["tokens"])
    shutil.copytree(original / "mp8/ckpt_slim_bf16", tmp_path / "run")
    _, errors = run("device_train.py", "--config", "config.json", cwd=tmp_path, code=2)
    assert "not its meta.json" in errors
    meta = {"step": 5, "checkpoints": [5], "aux": {"5": {}}}
    (tmp_path / "run/meta.json").write_text(json.dumps(meta))
    _, errors = run("device_train.py", "--config", "config.json", cwd=tmp_path, code=2)
    assert "has no Adam moments, so a run cannot resume from it" in errors
    assert "--tune-model-path" in errors


@pytest.mark.nightly
def test_sampling_from_a_bucket_of_2021(tmp_path: Path, original: Path) -> None:
    """The same greedy tokens from local and remote shards."""
    prepare(tmp_path, original, golden(original, "mp1/f32/train")["tokens"])
    local = original / "mp8/ckpt_full"
    options = ["--prompt-tokens", "5,9,200,31", "--max-new-tokens", "6", "--temperature", "0", "--json"]

    def sample(checkpoint: str, **environment: str) -> list[int]:
        output, _ = run(
            "device_sample.py", "--config", "config.json", "--ckpt", checkpoint, *options,
            cwd=tmp_path, **environment,
        )  # fmt: skip
        return json.loads(output)["tokens"]

    with GcsServer() as server:
        for path in local.rglob("*.npz"):
            server.put("old", path.relative_to(local).as_posix(), path.read_bytes())
        server.put("old", "meta.json", b'{"step": 5, "checkpoints": [5], "aux": {}}')
        server.fail(503, method="GET", times=2)
        assert sample("gs://old", **server.environment()) == sample(str(local))
