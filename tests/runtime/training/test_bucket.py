"""A run with its checkpoints and data in a bucket, on a fake server."""

import json
import shutil

import pytest
from support.commands import metrics, run, write_run
from support.gcs_server import GcsServer


@pytest.fixture
def bucket():
    with GcsServer() as server:
        yield server


def _steps(server: GcsServer) -> set[str]:
    return {name.split("/")[1] for name in server.objects("models") if "commit_success" in name}


def test_a_run_in_a_bucket_is_resumed_on_a_fresh_machine(tmp_path, bucket):
    first, second = tmp_path / "first", tmp_path / "second"
    checkpoint = {"bucket": "models", "model_dir": "run", "ckpt_every": 4, "keep_every": None}
    data = {"train_set": "gs://texts/corpus.txt", "val_set": {"held": "gs://texts/corpus.txt"}}
    write_run(first, checkpoint=checkpoint, data=data, logging={"plot": True, "profile_steps": [6, 7]})
    bucket.put("texts", "corpus.txt", (first / "text.txt").read_bytes())
    environment = bucket.environment()
    bucket.fail(503, method="GET", times=2)
    run(
        "device_train.py",
        "--config",
        "config.json",
        "--set",
        "optimizer.total_steps=8",
        cwd=first,
        **environment,
    )
    assert _steps(bucket) == {"step_4", "step_8"}
    assert not list(first.glob("run/step_*"))

    second.mkdir()  # only the config of the first machine
    shutil.copy(first / "config.json", second)
    run("device_train.py", "--config", "config.json", cwd=second, **environment)
    assert _steps(bucket) == {"step_8", "step_12"}
    assert [record["step"] for record in metrics(second / "run")] == list(range(1, 13))
    stored = bucket.objects("models")
    assert stored["run/metrics.jsonl"] == (second / "run/metrics.jsonl").read_bytes()
    assert stored["run/loss.png"].startswith(b"\x89PNG")
    # steps 6 and 7 are of the first machine
    (trace,) = (first / "run/profile").rglob("perfetto_trace.json.gz")
    assert stored[trace.relative_to(first).as_posix()] == trace.read_bytes()
    assert not (second / "run/profile").exists()

    output, _ = run(
        "device_sample.py", "--config", "config.json", "--prompt", "7 b", "--max-new-tokens", "3", "--json", cwd=second,
        **environment,
    )  # fmt: skip
    assert len(json.loads(output)["tokens"]) == 3
    # Without the bucket, the same paths are local and empty.
    _, errors = run(
        "device_sample.py", "--config", "config.json", "--prompt", "7 b", "--set", "checkpoint.bucket=", cwd=second,
        code=2,
        **environment,
    )  # fmt: skip
    assert "no checkpoint in run" in errors

    # The first machine has a copy of a run that --new deleted.
    new = ("--new", "--yes", "--set", "optimizer.total_steps=4")
    _, errors = run("train.py", "--config", "config.json", *new, cwd=first, **environment)
    assert " I reached step 4 of 4, " in errors.splitlines()[-1]
    assert "; checkpoint gs://models/run/step_4; " in errors.splitlines()[-1]
    assert _steps(bucket) == {"step_4"}
    records = metrics(first / "run")
    assert [(record["step"], record["train/steps_redone"]) for record in records] == [(i, 0) for i in range(1, 5)]
    assert bucket.objects("models")["run/metrics.jsonl"] == (first / "run/metrics.jsonl").read_bytes()
    assert not (first / "run/profile").exists()
