"""The commands device_train.py and device_sample.py."""

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.commands import CONFIG, REPO, finish, metrics, run, start, wait_for_step, write_run

import device_train
import from_hf_weights
import to_hf_weights
from mesh_transformer import logs
from mesh_transformer.checkpoint.native.source import read_manifest
from mesh_transformer.config import load_config
from mesh_transformer.errors import UserError
from mesh_transformer.runtime import cli
from mesh_transformer.runtime.training import run_folder, trainer
from mesh_transformer.runtime.training.result import TrainingResult
from mesh_transformer.runtime.training.start import TuningSource


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run of 12 steps."""
    folder = tmp_path_factory.mktemp("trained")
    write_run(folder, logging={"tensorboard": True, "plot": True})
    output, errors = run("device_train.py", "--config", "config.json", cwd=folder)
    assert output == ""
    assert "training 12/12" in errors
    assert " 1 x cpu in 1 process: one device; " in errors
    lines = errors.splitlines()
    before = [
        line.partition(" I ")[2].partition(": the tokens")[0] for line in lines[:7] if " parameters; " not in line
    ]
    # the text is the training set and the validation set
    assert before == [
        "importing JAX", "reading text.txt", "tokenizing text.txt", "reading text.txt", "compiling: initial parameters",
        "compiling: training step",
    ]  # fmt: skip
    compiled = next(i for i, line in enumerate(lines) if "compiling: validation" in line)
    assert "val/loss_held" in lines[compiled + 1]
    assert "programs compiled" in lines[-2]
    loss = metrics(folder / "run")[-1]["val/loss_held"]
    assert lines[-1].endswith(
        f" I reached step 12 of 12, val loss {loss:.2f}; checkpoint run/step_12; "
        "sample: python device_sample.py --ckpt run --prompt Hello"
    )
    output = [line.partition(" I ")[2] for line in lines if "val/loss_held" in line]
    assert [line.partition(":")[0] for line in output] == ["step 5", "step 10", "step 12"]
    # a token is a byte, and one more token ends the text
    n = (folder / "text.txt").stat().st_size
    bits = metrics(folder / "run")[-1]["val/bits_per_byte_held"]
    assert bits == pytest.approx(loss / math.log(2) * (n + 1) / n, rel=1e-9)
    shown = f"val/loss_held {loss:.4f}  val/bits_per_byte_held {bits:.4f}  val/accuracy_held 0."
    assert output[-1].startswith(f"step 12: {shown}")
    return folder


def test_metrics_have_one_record_a_step(trained):
    records = metrics(trained / "run")
    assert [record["step"] for record in records] == list(range(1, 13))
    for record in records:
        for name in ("loss", "last_loss", "grad_norm", "learning_rate", "tokens_per_sec"):
            assert math.isfinite(record[f"train/{name}"]), name
        assert {"noise/G_noise", "noise/S_noise", "noise/B_simple"} <= record.keys()
        assert ("val/loss_held" in record) == (record["step"] in (5, 10, 12))
    assert records[0]["train/learning_rate"] == 0
    assert records[5]["train/learning_rate"] == pytest.approx(1e-2)  # the peak, after 5 steps of warm-up
    assert records[0]["train/loss"] == pytest.approx(math.log(257), abs=0.6)  # about the loss of a uniform guess
    assert records[-1]["train/loss"] < records[0]["train/loss"] - 1


def test_the_run_leaves_checkpoints_plots_and_events(trained):
    folder = trained / "run"
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_10", "step_12", "step_5"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events*"))
    assert not list(folder.glob("experts*"))


def test_a_finished_run_does_nothing_more(trained):
    before = (trained / "run/metrics.jsonl").read_bytes()
    _, errors = run("device_train.py", "--config", "config.json", cwd=trained)
    last = errors.splitlines()[-1]
    assert "the run is complete: step 12 of 12; to continue, increase the steps: --set optimizer.total_steps=N;" in last
    assert "checkpoint run/step_12; sample: python device_sample.py --ckpt run --prompt Hello" in last
    assert "changed options" not in errors
    assert (trained / "run/metrics.jsonl").read_bytes() == before


def test_a_resume_logs_changed_options(trained):
    changes = ["optimizer.lr=0.02", "data.val_every=6", "compute.remat=full", "checkpoint.ckpt_every=7"]
    sets = [part for change in changes for part in ("--set", change)]
    recorded = read_manifest(str(trained / "run/step_12")).extra["provenance"]
    assert recorded["resolved"]["data.packing"] == "concat"
    threads = recorded["threads"] + 1
    _, errors = run("device_train.py", "--config", "config.json", *sets, cwd=trained, PJRT_NPROC=str(threads))
    # a commit between the two commands stands there too
    (line,) = [line for line in errors.splitlines() if "the steps will not be equal in bits" in line]
    assert "since step 12 this has changed: " in line
    assert f"CPU threads {threads - 1} -> {threads}" in line
    (output,) = [line for line in errors.splitlines() if "changed options" in line]
    assert output.endswith(
        'resuming with changed options: compute.remat "auto" -> "full", optimizer.lr 0.01 -> 0.02, data.val_every 5 -> '
        "6"
    )


def _written(folder: Path) -> list[tuple[Path, int]]:
    """All files with their times, except the lock, which each start writes."""
    return sorted(
        (path, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file() and path.name != run_folder.LOCK
    )


def test_another_model_of_equal_shapes_is_not_resumed(trained):
    before = _written(trained / "run")
    sets = ["--set", "model.n_heads=8", "--set", "model.pe_rotary_dims=4"]
    _, errors = run("device_train.py", "--config", "config.json", *sets, cwd=trained, code=2)
    assert "run/step_12 does not match this config" in errors
    assert "model.n_heads: the config has 8, the checkpoint 4" in errors
    assert "model.pe_rotary_dims: the config has 4, the checkpoint 8" in errors
    assert "Traceback" not in errors
    assert _written(trained / "run") == before


def test_the_last_line_names_a_command_that_works_on_any_devices():
    result = TrainingResult(0, 0, 2000, 2000, {"a": 1.661, "b": 2.0}, "runs/my x/step_2000")
    assert result.summary() == (
        "reached step 2,000 of 2,000, val loss 1.66 (a), 2.00 (b); checkpoint runs/my x/step_2000; sample: "
        "python device_sample.py --ckpt 'runs/my x' --prompt Hello"
    )
    stopped = result._replace(code=143, step=1200)
    assert stopped.summary() == "saved after step 1,200 of 2,000; the same command resumes from there"


@pytest.mark.parametrize(("mfu", "least"), [({}, 15), ({"train/mfu": 0.432}, 6)])
def test_the_bar_has_room(monkeypatch, mfu, least):
    """On a terminal of 80 columns."""
    columns = 80
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(logs.Progress, "bars", True)
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (columns, 24))
    progress = logs.Progress("training", 2000, unit="step", done=900)
    scalars = {"train/loss": 1.6612, "train/tokens_per_sec": 123_456.0, **mfu}
    progress.update(1000, **logs.step_summary(scalars))
    progress.close()
    line = screen.getvalue().split("\r")[-1].rstrip("\n")
    assert len(line) <= columns
    assert "training 1000/2000 |" in line
    assert "loss 1.6612  tokens/s 123,456" in line
    bar = line.split("|")[1]
    assert len(bar) >= least
    assert ("mfu 43%" in line) == bool(mfu)


def _samples(folder: Path, *arguments: str, **options):
    output, errors = run("device_sample.py", "--config", "config.json", "--json", *arguments, cwd=folder, **options)
    return [json.loads(line) for line in output.splitlines()], errors


def test_sampling_text(trained):
    samples, _ = _samples(
        trained, "--prompt", "99 bottles", "--max-new-tokens", "12", "--num-samples", "3", "--seed", "4"
    )
    assert len(samples) == 3
    for sample in samples:
        assert set(sample) == {"prompt", "completion", "tokens", "logprobs", "seconds"}
        assert sample["prompt"] == "99 bottles"
        assert len(sample["tokens"]) == len(sample["logprobs"]) == 12
        assert bytes(t for t in sample["tokens"] if t < 256).decode(errors="replace") == sample["completion"]
        assert all(logprob <= 0 for logprob in sample["logprobs"])
    assert len({tuple(sample["tokens"]) for sample in samples}) > 1
    again, _ = _samples(
        trained, "--prompt", "99 bottles", "--max-new-tokens", "12", "--num-samples", "3", "--seed", "4"
    )
    assert [s["tokens"] for s in again] == [s["tokens"] for s in samples]


@pytest.fixture(scope="module")
def greedy(trained):
    """The continuation of "99 bottles", given as tokens, because there is no tokenizer."""
    prompt = ",".join(str(byte) for byte in b"99 bottles")
    samples, _ = _samples(
        trained, "--prompt-tokens", prompt, "--max-new-tokens", "8", "--temperature", "0",
        "--set", "data.tokenizer=/nonexistent",
    )  # fmt: skip
    return samples[0]


def test_sampling_tokens_needs_no_tokenizer_and_greedy_takes_the_largest(trained, greedy):
    assert greedy["completion"] is None
    assert greedy["prompt"] is None
    prompt = ",".join(str(byte) for byte in b"99 bottles")
    likely, _ = _samples(trained, "--prompt-tokens", prompt, "--max-new-tokens", "8", "--top-k", "1", "--seed", "9")
    assert likely[0]["tokens"] == greedy["tokens"]


def test_sampling_on_eight_devices_gives_the_same_tokens(trained, greedy):
    options = ["--prompt", "99 bottles", "--max-new-tokens", "8", "--temperature", "0"]
    axes = ["--set", "mesh.tp=2", "--set", "mesh.cp=2", "--set", "mesh.fsdp=2"]
    eight, errors = _samples(trained, *options, *axes, devices=8)
    assert "mesh.cp 2 splits the heads, as mesh.tp does" in errors
    assert eight[0]["tokens"] == greedy["tokens"]
    np.testing.assert_allclose(eight[0]["logprobs"], greedy["logprobs"], atol=1e-5)


def test_a_run_converted_to_hugging_face_and_back_keeps_its_tokenizer(trained, monkeypatch, greedy):
    monkeypatch.chdir(trained)
    monkeypatch.setattr(
        sys, "argv", ["to_hf_weights.py", "--input-ckpt", "run", "--output-path", "hf", "--dtype", "fp32"]
    )
    to_hf_weights.main()
    monkeypatch.setattr(sys, "argv", ["from_hf_weights.py", "--input", "hf", "--output-path", "back"])
    from_hf_weights.main()
    # the command's run of the config would hide a tokenizer that is absent
    output, _ = run(
        "device_sample.py", "--ckpt", "back", "--prompt", "99 bottles", "--temperature", "0", "--max-new-tokens", "8",
        "--json", cwd=trained,
    )  # fmt: skip
    sample = json.loads(output)
    assert sample["tokens"] == greedy["tokens"]
    assert sample["completion"] == bytes(sample["tokens"]).decode()


def test_a_prompt_beyond_the_context(trained):
    prompt = ",".join(["65"] * 40)
    _, errors = run(
        "device_sample.py",
        "--config",
        "config.json",
        "--prompt-tokens",
        prompt,
        "--max-new-tokens",
        "4",
        cwd=trained,
        code=2,
    )
    assert "40 tokens" in errors
    assert "--truncate" in errors
    samples, errors = _samples(trained, "--prompt-tokens", prompt, "--max-new-tokens", "4", "--truncate")
    assert len(samples[0]["tokens"]) == 4
    assert "cut" in errors
    samples, _ = _samples(trained, "--prompt-tokens", prompt, "--truncate")
    assert len(samples[0]["tokens"]) == 16  # half of the context by default


def test_fine_tuning_starts_at_step_zero_with_other_weights(trained, tmp_path):
    """And with val_batches 0, there is no validation."""
    write_run(tmp_path, optimizer={"total_steps": 2}, data={"val_batches": 0, "val_set": {"held": "absent.txt"}})
    losses = {}
    for name, extra in {"tuned": [], "fresh": ["--fresh-opt"]}.items():
        run(
            "device_train.py", "--config", "config.json", "--tune-model-path", str(trained / "run"), *extra,
            "--set", f"checkpoint.model_dir={name}", "--set", "optimizer.warmup_steps=1", cwd=tmp_path,
        )  # fmt: skip
        records = metrics(tmp_path / name)
        assert [record["step"] for record in records] == [1, 2]
        assert [record["train/learning_rate"] for record in records] == [0, pytest.approx(1e-2)]
        assert not any("val/" in name for record in records for name in record)
        losses[name] = records[0]["train/loss"]
    assert losses["tuned"] == losses["fresh"]
    assert losses["tuned"] < math.log(257) - 1  # it did not start from random weights


def assert_one_line(errors: str, message: str) -> None:
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in errors


def test_bad_input_is_one_line_and_exit_code_2(trained):
    _, errors = run(
        "device_train.py", "--config", "config.json", "--set", "checkpoint.model_dir=other", "--set", "mesh.tp=4",
        cwd=trained, code=2,
    )  # fmt: skip
    assert_one_line(errors, "--set mesh.tp=1")
    assert not list(trained.glob("other/step_*"))


@pytest.fixture
def run_here(trained, monkeypatch, capfd):
    """Runs device_train.py in this process. Returns its exit code and standard error."""
    monkeypatch.chdir(trained)
    monkeypatch.setenv("XDG_CACHE_HOME", str(trained / "cache"))
    # a command replaces it
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["device_train.py", "--config", "config.json", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.run(device_train.main)
        return ended.value.code, capfd.readouterr().err

    return command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "model.n_head=4"], "model.n_heads"),
        (["--set", "data.batch_size=6", "--set", "mesh.dp=4"], "data.batch_size 6"),
        (["--set", "data.seq=64"], "model.seq 32"),
        (["--set", "data.train_set=absent.txt"], "absent.txt"),
        (["--set", "data.val_set.x=absent.index"], "absent.index"),
        (["--set", "data.train_set=short.txt"], "sequence of 33 (1 document): add text or choose a shorter data.seq"),
        (["--set", "checkpoint.model_dir=text.txt"], "model_dir text.txt"),
        (["--fresh-opt"], "--tune-model-path"),
        (["--tune-model-path", "nowhere"], "nowhere"),
    ],
)
def test_every_bad_input_is_one_line(trained, run_here, arguments, message):
    (trained / "short.txt").write_text("abc")
    code, errors = run_here("--set", "checkpoint.model_dir=other", *arguments)
    assert code == 2
    assert_one_line(errors, message)
    assert not list(trained.glob("other/step_*"))


def test_an_error_closes_the_training_data(trained, monkeypatch):
    class Feed:
        closed = False

        def close(self):
            self.closed = True

    monkeypatch.chdir(trained)
    config = load_config("config.json", ["data.val_set.x=absent.index"])
    feed = Feed()
    with pytest.raises(UserError, match="absent.index"):
        trainer.train(config, TuningSource(), open_feed=lambda _: feed)
    assert feed.closed


def test_a_second_run_in_one_folder_is_refused(trained, run_here, monkeypatch):
    monkeypatch.setattr(run_folder, "WAIT_S", 0.2)
    before = (trained / "run/metrics.jsonl").read_bytes()
    with run_folder.RunLock(str(trained / "run")):
        code, errors = run_here("--set", "optimizer.total_steps=20")
    assert code == 2
    assert_one_line(errors, f"model_dir run is in use: process {os.getpid()} on host")
    assert (trained / "run/metrics.jsonl").read_bytes() == before


def test_a_folder_that_is_deleted_during_the_run(trained):
    long = [
        "--set",
        "checkpoint.model_dir=gone",
        "--set",
        "optimizer.total_steps=400",
        "--set",
        "data.val_batches=0",
    ]
    process = start(
        "device_train.py", "--config", "config.json", *long, "--set", "checkpoint.ckpt_every=200", cwd=trained
    )
    wait_for_step(process, trained / "gone", 20)
    shutil.rmtree(trained / "gone")
    _, errors = finish(process, 1)
    assert_one_line(errors, "gone was deleted or moved during the run")


def assert_interrupted(program):
    child = subprocess.run(
        [sys.executable, program], env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True
    )
    assert (child.returncode, child.stdout, child.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_is_one_line_with_unfinished_objects(tmp_path):
    """Python 3.13's HTTPResponse complains of that when it is deleted."""
    program = tmp_path / "program.py"
    program.write_text(
        "from mesh_transformer.runtime import cli\n"
        "class Half:\n"
        "    def __del__(self): self.absent\n"
        "def main():\n"
        "    half = Half()\n"
        "    raise KeyboardInterrupt\n"
        "cli.run(main)\n"
    )
    assert_interrupted(program)


def test_a_ctrl_c_that_python_ignores_in_the_garbage_collector_ends_the_command(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import gc, signal, time\n"
        "from mesh_transformer.runtime import cli\n"
        "def interrupt(phase, info):\n"
        "    gc.callbacks.clear()\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "def main():\n"
        "    gc.callbacks.append(interrupt)\n"
        "    gc.collect()\n"
        "    time.sleep(5)\n"
        "    raise SystemExit('the interrupt was lost')\n"
        "cli.run(main)\n"
    )
    assert_interrupted(program)


def test_ctrl_c_before_the_first_step_ends_the_run_at_once(trained, run_here, monkeypatch):
    def read(session):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(trainer.train, "__defaults__", (None, read, None))
    code, errors = run_here("--set", "checkpoint.model_dir=other")
    assert code == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "saving" not in errors


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        ("cuda", "no GPU found (JAX_PLATFORMS=cuda); install the packages for it (pip install -e '.[cuda]'), or unset"),
        ("tpu", "no TPU found (JAX_PLATFORMS=tpu): Unable to initialize backend 'tpu': "),
    ],
)
def test_an_accelerator_that_is_absent_is_one_line(trained, platform, message):
    _, errors = run("device_train.py", "--config", "config.json", cwd=trained, code=2, JAX_PLATFORMS=platform)
    assert_one_line(errors, message)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(trained, tmp_path):
    write_run(
        tmp_path,
        optimizer={"lr": 1e30, "end_lr": 1e30, "warmup_steps": 2, "clip_norm": 1e30, "weight_decay": 0},
    )
    _, errors = run(
        "device_train.py", "--config", "config.json", "--set", "checkpoint.ckpt_every=1", cwd=tmp_path, code=1
    )
    assert "not finite" in errors
    assert "Traceback" not in errors
    records = metrics(tmp_path / "run")
    assert None in [records[-1][f"train/{name}"] for name in ("loss", "grad_norm", "param_norm")]
    saved = [int(path.name.removeprefix("step_")) for path in (tmp_path / "run").glob("step_*")]
    assert max(saved) == records[-1]["step"] - 1


def test_an_update_that_is_not_finite_is_never_saved(tmp_path):
    """The loss is still finite when the parameters overflow. The checkpoint before must stay."""
    write_run(tmp_path, optimizer={"warmup_steps": 1}, checkpoint={"ckpt_every": 1, "keep_every": None})
    _, errors = run("device_train.py", "--config", "config.json", "--set", "optimizer.lr=1e38", cwd=tmp_path, code=1)
    assert "not finite" in errors
    run("device_train.py", "--config", "config.json", cwd=tmp_path)
    records = metrics(tmp_path / "run")
    assert records[-1]["step"] == 12
    assert records[-1]["train/loss"] < 6


def test_classic_spelling_trains(tmp_path):
    """A flat config of a fork from 2021, with smaller sizes. Its W&B project needs no account."""
    write_run(tmp_path)
    classic = {
        "layers": 2, "d_model": 32, "n_heads": 4, "n_vocab": 257, "norm": "layernorm", "pe": "rotary",
        "pe_rotary_dims": 64,
        "d_head": 4, "seq": 32, "cores_per_replica": 4, "per_replica_batch": 1, "gradient_accumulation_steps": 2,
        "warmup_steps": 2,
        "anneal_steps": 10, "lr": 1e-3, "end_lr": 1e-4, "weight_decay": 0.1, "total_steps": 4, "tpu_size": 256,
        "model_dir": "classic", "train_set": "text.txt", "val_set": {"held": "text.txt"}, "val_batches": 1,
        "val_every": 99999999999, "ckpt_every": 3, "keep_every": 3, "eval_harness_tasks": {}, "step_shift": 3,
        "name": "old", "wandb_project": "mesh", "comment": "",
    }  # fmt: skip
    (tmp_path / "classic.json").write_text(json.dumps(classic))
    _, errors = run(
        "device_train.py", "--config", "classic.json", "--set", "data.tokenizer=bytes", "--ignore-keys", "step_shift",
        cwd=tmp_path, devices=8, WANDB_MODE="offline",
    )  # fmt: skip
    assert "dp 2 x tp 4" in errors
    records = metrics(tmp_path / "classic")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [("val/loss_held" in record) for record in records] == [False, False, False, True]
    assert sorted(path.name for path in (tmp_path / "classic").glob("step_*")) == ["step_3", "step_4"]
    warnings = [line.split(" W ")[1] for line in errors.splitlines() if "classic.json: " in line]
    output = [warning.split(": ")[1].split()[:2] for warning in warnings]
    assert output == [["d_head", "4"], ["pe_rotary_dims", "64"]]


assert CONFIG["checkpoint"]["ckpt_every"] == 5  # the tests above rely on it
