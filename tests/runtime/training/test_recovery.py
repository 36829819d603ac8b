"""A run that is killed and started again has the same results as an uninterrupted run."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support.commands import finish, free_port, listens_at, metrics, run, start, wait_for_step, write_run

STEPS = 240
SAME = (
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
    "noise/B_simple",
    "noise/G_noise",
    "val/loss_held",
)


def _write(folder):
    return write_run(
        folder,
        optimizer={"total_steps": STEPS, "anneal_steps": STEPS},
        data={"val_every": 120},
        checkpoint={"ckpt_every": 60, "keep_every": None},
    )


def test_killed_three_times_a_run_ends_as_if_it_were_not(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    _write(straight), _write(killed)
    run("device_train.py", "--config", "config.json", cwd=straight)
    redone = []
    for number, step, code in [
        (signal.SIGKILL, 75, -signal.SIGKILL),
        (signal.SIGKILL, 100, -signal.SIGKILL),  # twice between the same two checkpoints
        (signal.SIGTERM, 140, 143),
    ]:
        process = start("device_train.py", "--config", "config.json", cwd=killed)
        wait_for_step(process, killed / "run", step)
        process.send_signal(number)
        if number == signal.SIGTERM:
            # cluster managers repeat signals
            process.send_signal(number)
        finish(process, code)
        redone.append(metrics(killed / "run")[-1]["step"])
    run("device_train.py", "--config", "config.json", cwd=killed)

    expected = {record["step"]: record for record in metrics(straight / "run")}
    records = metrics(killed / "run")
    last = {record["step"]: record for record in records}
    assert last.keys() == expected.keys()
    for record in records:  # repeated steps have the same numbers both times
        for name in SAME:
            assert record.get(name) == expected[record["step"]].get(name), (record["step"], name)

    repeated = len(records) - STEPS
    assert repeated > 0
    assert records[-1]["train/steps_redone"] == repeated
    steps = [record["step"] for record in records]
    after_sigterm = steps[len(steps) - 1 - steps[::-1].index(redone[2]) + 1]
    assert after_sigterm == redone[2] + 1  # SIGTERM saved, so no step was repeated


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Two runs without validation: `run` with 12 steps, and `begun` with 5 of them."""
    folder = tmp_path_factory.mktemp("straight")
    write_run(folder, checkpoint={"ckpt_every": 4, "keep_every": 4}, data={"val_set": {}})
    run("device_train.py", "--config", "config.json", cwd=folder)
    stop = ["--set", "checkpoint.model_dir=begun", "--set", "optimizer.total_steps=5"]
    run("device_train.py", "--config", "config.json", *stop, cwd=folder)
    return folder


@pytest.fixture
def copy(straight, tmp_path) -> Path:
    """A copy of both runs, with config and data, for one test."""
    return shutil.copytree(straight, tmp_path / "copy")


def test_a_damaged_newest_checkpoint_falls_back(copy):
    expected = {record["step"]: record["train/loss"] for record in metrics(copy / "run")}
    damaged = [path for path in (copy / "run/step_12").rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert damaged
    for path in damaged:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    _, errors = run("device_train.py", "--config", "config.json", cwd=copy)
    assert "step 12" in errors
    assert "damaged" in errors
    redone = metrics(copy / "run")[12:]
    assert [record["step"] for record in redone] == [9, 10, 11, 12]
    for record in redone:
        assert record["train/loss"] == expected[record["step"]]
    assert redone[-1]["train/steps_redone"] == 4


@pytest.mark.parametrize("third", ["dp", "cp"])
def test_another_mesh_continues_the_same_run(copy, third):
    """Saved on one device, resumed on dp 2 x fsdp 2 x tp 2 or fsdp 2 x cp 2 x tp 2: float32 sums differ in their order
    only.

    The metrics file ends with a line that is no record: the run removes it.
    """
    with (copy / "begun/metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/loss": ' + "[" * 100_000)
    axes = ["--set", "mesh.fsdp=2", "--set", "mesh.tp=2", "--set", f"mesh.{third}=2"]
    mesh = ["--set", "checkpoint.model_dir=begun", *axes]
    _, errors = run("device_train.py", "--config", "config.json", *mesh, cwd=copy, devices=8)
    assert errors.count("the line is removed") == 1
    one, many = metrics(copy / "run"), metrics(copy / "begun")
    assert [record["step"] for record in many] == list(range(1, 13))
    for a, b in zip(one, many, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-5)


@pytest.fixture
def small_disk(copy):
    """A folder `disk` with the run `begun` on a 3 MiB file system, and a function that fills it except for some
    bytes."""
    disk = copy / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here, to be filled: {mounted.stderr.strip()}")
    shutil.copytree(copy / "begun", disk / "begun")

    def leave(size):
        (disk / "filler").unlink(missing_ok=True)
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "filler").write_bytes(bytes(free - size))

    yield disk, leave
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_is_one_line_and_costs_no_checkpoint(copy, small_disk):
    """The disk is full during a save, during the metrics before it, or at the lock at the start. The run says at its
    start that this may happen. With space, it resumes."""
    disk, leave = small_disk
    command = ["device_train.py", "--config", "config.json", "--set", "checkpoint.model_dir=disk/begun"]
    for room in (64 << 10, 0, None):
        if room is None:
            (disk / "begun/run.lock").unlink()
        leave(room or 0)
        # tensorboardX imports torch, which takes seconds
        more = ["--set", "logging.tensorboard=true", "--set", "logging.plot=true"] if room else []
        _, errors = run(*command, *more, cwd=copy, code=1)
        # the run before may have written half a line of metrics: a warning says that it is removed
        expected = re.compile(r"\d\d:\d\d:\d\d (I |W .*metrics\.jsonl ended with|W a save may fill the disk)")
        lines = [line for line in errors.splitlines() if not expected.match(line)]
        assert len(lines) == 1, errors
        _check_full_disk(lines[0], disk)
        if room:
            # two checkpoints exist, and the third has no room
            assert "it needs room for 3 checkpoints of 601 kB (checkpoint.keep_latest 2), of which 601 kB" in errors
            assert "disk/begun has 65.5 kB free" in errors
            assert "--set checkpoint.keep_latest=1" in errors
    (disk / "filler").unlink()
    run(*command, cwd=copy)
    last = {record["step"]: record["train/loss"] for record in metrics(disk / "begun")}
    assert last == {record["step"]: record["train/loss"] for record in metrics(copy / "run")}


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_a_full_disk_ends_a_job_of_two_processes(copy, small_disk):
    """The process with the failing write does not wait for the other one, and the driver does not retry."""
    disk, leave = small_disk
    leave(64 << 10)
    command = ["--config", "config.json", "--set", "checkpoint.model_dir=disk/begun", "--processes", "2"]
    command += ["--set", "logging.tensorboard=true", "--set", "logging.plot=true"]
    _, errors = run("train.py", *command, cwd=copy, code=1, TMPDIR=str(copy))
    _check_full_disk(errors.splitlines()[-1], disk)
    assert "restarting in" not in errors
    assert "Traceback" not in errors


def _check_full_disk(line, disk):
    assert line.startswith("error: disk/begun: the disk is full")
    assert "the newest complete checkpoint is step_5. Free some space and run the same command again" in line
    whole = {path.name for path in (disk / "begun").glob("step_*") if "tmp" not in path.name}
    assert whole == {"step_4", "step_5"}


def test_changed_data_is_refused_or_read_anew(copy):
    command = ["device_train.py", "--config", "config.json", "--set", "checkpoint.model_dir=begun"]
    text = copy / "text.txt"
    text.write_text(text.read_text() + "One more line, and the text is another one.\n")
    _, errors = run(*command, cwd=copy, code=2)
    assert "--set data.restart=true" in errors
    _, errors = run(*command, "--set", "data.restart=true", cwd=copy)
    assert "from its beginning" in errors
    assert [record["step"] for record in metrics(copy / "begun")] == list(range(1, 13))


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_two_processes_of_four_devices_equal_one_of_eight(tmp_path):
    """Two processes give the same numbers. A SIGTERM to one of them stops both after the same step, and both resume, as
    two tasks of Slurm."""
    mesh = [
        "--set",
        "mesh.fsdp=2",
        "--set",
        "mesh.tp=2",
        "--set",
        "optimizer.total_steps=16",
        "--set",
        "data.val_every=8",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    write_run(one), write_run(two)
    run("device_train.py", "--config", "config.json", *mesh, cwd=one, devices=8)

    def start_both(variables, number):
        arguments = ["--config", "config.json", *mesh]
        return [
            start("device_train.py", *arguments, cwd=two, devices=4, **variables, **{number: str(i)}) for i in range(2)
        ]

    port = free_port()
    variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    processes = start_both(variables, "JAX_PROCESS_ID")
    wait_for_step(processes[0], two / "run", 4)
    assert listens_at(processes[0].pid, port) == {"127.0.0.1"}  # JAX's coordinator has no authentication
    processes[1].send_signal(signal.SIGTERM)
    for process in processes:
        finish(process, 143)
    stopped = metrics(two / "run")[-1]["step"]
    assert 4 <= stopped < 16
    assert (two / f"run/step_{stopped}").exists()
    # the number of the job gives the port
    slurm = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(os.getpid())}
    for process in start_both({**slurm, "SLURM_STEP_ID": "0"}, "SLURM_PROCID"):
        _, errors = finish(process)
        # process 1 stores no programs, and reads those of process 0
        assert int(re.search(r"programs? compiled, (\d+) read", errors)[1]) > 0
    expected, records = metrics(one / "run"), metrics(two / "run")
    assert [record["step"] for record in records] == list(range(1, 17))
    for a, b in zip(expected, records, strict=True):
        # float32 sums in another order, over 16 steps
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-4)
        assert ("val/loss_held" in a) == ("val/loss_held" in b)
