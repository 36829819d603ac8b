"""train.py as a user launches it, on a TPU of four hosts with eight devices, also after failures.

In the first run hosts and driver share no folder. The driver reads the training data, tiny_shakespeare, and streams it;
checkpoints, metrics and validation data are in a bucket. The run with the faults has its checkpoints in a folder that
all hosts mount, and each host reads the training data from the bucket.
"""

import contextlib
import json
import math
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import commands, peft_folders
from support.commands import metrics
from support.driving import same_numbers
from support.faults import EVERY, FAULTS, SLICE_PREEMPTED, Recovery, kill_driver, middle, recover_from
from support.gate import Gate
from support.hosts import PodOfHosts
from support.pod_driver import PodDrivers, pod_drivers

from mesh_transformer.config import load_config

pytestmark = [pytest.mark.faults, pytest.mark.multiprocess]
STEPS = 4 * EVERY
# nats per byte, with equal probabilities of all bytes
UNTRAINED = math.log(256)
# nats per byte of a model that knows only the frequency of each byte in tiny_shakespeare
LETTERS = 3.3


@pytest.fixture(scope="module")
def drivers(hosts: PodOfHosts) -> Iterator[PodDrivers]:
    with pod_drivers(hosts) as made:
        yield made


@pytest.fixture(scope="module")
def straight(drivers: PodDrivers) -> tuple[Path, str, list[str]]:
    """The folder of an uninterrupted run, the output of its driver, and the output of each worker."""
    folder = drivers.write("straight", STEPS, EVERY, shared=False)
    with drivers.start(folder) as run:
        shown = run.finish()
    (folder / "run").mkdir()
    (folder / "run/metrics.jsonl").write_bytes(drivers.gcs.objects("models")["straight/metrics.jsonl"])
    logs = [drivers.hosts.inside(i, "bash", "-c", f"cat /tmp/mesh-transformer-0/*-{i}.log").stdout for i in range(4)]
    return folder / "run", shown, logs


def test_the_whole_launch(straight: tuple[Path, str, list[str]], drivers: PodDrivers) -> None:
    """From an empty cloud to a trained, evaluated and saved model."""
    folder, shown, logs = straight
    assert drivers.api.calls.count("CreateNode") == 1
    assert "8 x cpu in 4 processes: dp 2 x fsdp 2 x tp 2" in shown
    # gloo logs the number of each host
    for i, log in enumerate(logs):
        assert set(re.findall(r"Rank (\d) is connected to 3 peer ranks", log)) == {str(i)}
    records = metrics(folder)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[0]["train/loss"] > UNTRAINED
    validated = {r["step"]: r["val/loss_shakespeare"] for r in records if "val/loss_shakespeare" in r}
    assert list(validated) == list(range(EVERY, STEPS + 1, EVERY))
    assert validated[STEPS] < LETTERS - 0.5
    stored = drivers.gcs.objects("models")
    complete = {name.split("/")[1] for name in stored if "commit_success" in name}
    assert complete == {f"step_{STEPS - EVERY}", f"step_{STEPS}"}
    assert stored["straight/loss.png"].startswith(b"\x89PNG")
    assert f"training {STEPS}/{STEPS}" in shown
    assert "cost: 8 chips" in shown
    left = [path.name for path in drivers.private.glob("straight/*")]
    assert sorted(left) == ["config.json", "run"], "the run must leave nothing on the driver"
    for i in range(4):
        assert drivers.hosts.inside(i, "test", "-e", str(drivers.records)).returncode == 1


def test_evaluation(straight: tuple[Path, str, list[str]], drivers: PodDrivers, texts: Path) -> None:
    """eval_harness.py on the slice equals one process: with the checkpoint in the bucket, adapters of PEFT, and the
    first questions of LAMBADA."""
    pytest.importorskip("lm_eval")
    data, folder = drivers.shared / "questions", straight[0].parent
    (data / "lambada").mkdir(parents=True)
    lines = (texts / "lambada/lambada_test.jsonl").read_text().splitlines(keepends=True)
    (data / "lambada/lambada_test.jsonl").write_text("".join(lines[:16]))
    adapter, model = drivers.shared / "adapter", load_config(str(folder / "config.json")).model
    peft_folders.write_adapters_of(model, str(adapter), None)
    command = ("--adapter", str(adapter), "--tasks", "lambada", "--data-dir", str(data), "--limit", "12", "--output")
    alone = commands.start(
        "eval_harness.py", "--config", "config.json", *command, "alone.json", cwd=folder, devices=8,
        **drivers.gcs.environment(),
    )  # fmt: skip
    with drivers.start(folder, *command, "slice.json", program="eval_harness.py") as run:
        run.finish()
    commands.finish(alone)
    found, expected = (json.loads((folder / f"{name}.json").read_text()) for name in ("slice", "alone"))
    assert found["evaluation"] == expected["evaluation"]
    assert found["evaluation"]["step"] == STEPS
    assert found["tokens"] == expected["tokens"]
    one, other = (report["results"]["lambada_openai"] for report in (found, expected))
    assert one["acc,none"] == other["acc,none"]
    assert math.log(one["perplexity,none"]) == pytest.approx(math.log(other["perplexity,none"]), rel=1e-6)


def test_a_folder_that_hosts_do_not_share(drivers: PodDrivers) -> None:
    """Every host has its own /tmp, without the checkpoints of the others. The error comes before any computation."""
    folder = drivers.write("own", STEPS, EVERY)
    with drivers.start(folder, "--set", "checkpoint.model_dir=/tmp/run") as run:
        shown = run.finish(2)
    # every worker finds it; the first to report is shown
    assert re.search(r"error: worker [0-3]: checkpoint\.model_dir /tmp/run is not shared by all hosts", shown)
    assert "processes [1, 2, 3] do not see" in shown
    assert "Traceback" not in shown
    left = [set(drivers.hosts.inside(i, "ls", "-A", "/tmp/run").stdout.split()) for i in range(4)]
    assert left == [{"run_id", "run.lock"}, set(), set(), set()]


def test_faults_in_one_run(straight: tuple[Path, str, list[str]], drivers: PodDrivers) -> None:
    """A raylet with agent and worker, a network and the driver fail, one after the other. All numbers stay the same."""
    folder = drivers.write("faults", STEPS, EVERY)
    gate = Gate(folder / "gate", middle(1))
    found: list[Recovery] = []
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(drivers.start(folder, *gate.options))
        for number, name in enumerate(("raylet killed", "link down"), 1):
            found.append(recover_from(drivers, run, gate, FAULTS[name], number))
            sys.stdout.write(f"{found[-1]}\n")
            assert all(drivers.environment(i)["JAX_PROCESS_ID"] == str(i) for i in range(4))
        run, _ = kill_driver(drivers, run, gate, 3, lambda: stack.enter_context(drivers.start(folder, *gate.options)))
        run.finish()
    records = same_numbers(straight[0], folder / "run")
    assert records[-1]["train/steps_redone"] == sum(one.steps_redone for one in found)
    assert len(records) - STEPS == records[-1]["train/steps_redone"]


def test_one_of_two_slices_is_preempted(straight: tuple[Path, str, list[str]], drivers: PodDrivers) -> None:
    """Two slices of two hosts have the numbers of one slice of four hosts, also after the loss of a slice. Then SIGTERM
    ends the run, to save time.

    The same order of the additions in both needs mesh.sum_gradients=per_microbatch.
    """
    folder = drivers.write("slices", STEPS, EVERY)
    drivers.api.nodes.clear()
    mesh = ("--set", "mesh.dcn=dp", "--set", "mesh.sum_gradients=per_microbatch")
    # the last signal takes a second to the workers
    gate = Gate(folder / "gate", middle(1), pause_s=0.1)
    with drivers.start(folder, "--tpu-type", "v4-16", "--slices", "2", *mesh, *gate.options) as run:
        recovery = recover_from(drivers, run, gate, SLICE_PREEMPTED, 1)
        sys.stdout.write(f"{recovery}\n")
        found = [drivers.environment(i) for i in range(4)]
        drivers.hosts.driver_signal(run.process, signal.SIGTERM)
        gate.open()
        shown = run.finish(128 + signal.SIGTERM)
    assert [(each["JAX_PROCESS_ID"], each["MEGASCALE_SLICE_ID"]) for each in found] == [
        ("0", "0"), ("1", "0"), ("2", "1"), ("3", "1"),
    ]  # fmt: skip
    assert {each["MEGASCALE_NUM_SLICES"] for each in found} == {"2"}
    assert {each["MEGASCALE_COORDINATOR_ADDRESS"] for each in found} == {f"{drivers.hosts.addresses[0]}:8080"}
    # no time is lost with hosts that are gone
    assert "killing processes" not in shown
    assert "pod-0 READY, pod-1 PREEMPTED: deleting it and creating it again" in shown
    assert drivers.api.calls.count("CreateQueuedResource") == 2
    records = same_numbers(straight[0], folder / "run", stopped=True)
    assert records[-1]["step"] > recovery.at_step
    assert records[-1]["train/steps_redone"] == recovery.steps_redone
