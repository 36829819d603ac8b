"""The proof: train.py as a user launches it, on a TPU of four hosts with eight devices; and whatever dies, the same numbers."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import metrics
from driving import same_numbers
from faults import EVERY, FAULTS, Recovery, befall, kill_driver
from hosts import PodOfHosts
from pod_driver import PodDrivers, pod_drivers

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
STEPS = 4 * EVERY
DETECTION_S = 30
END_S = 240


@pytest.fixture(scope="module")
def drivers(hosts: PodOfHosts) -> Iterator[PodDrivers]:
    with pod_drivers(hosts) as made:
        yield made


@pytest.fixture(scope="module")
def straight(drivers: PodDrivers) -> tuple[Path, str, list[str]]:
    """The folder of a run to which nothing happens, what its driver showed, and each host's output of its worker."""
    folder = drivers.write("straight", STEPS, EVERY)
    with drivers.start(folder) as run:
        shown = run.finish(timeout_s=END_S)
    logs = [
        drivers.hosts.inside(i, "bash", "-c", f"cat /tmp/mesh-transformer-0/run-*-{i}.log").stdout
        for i in range(4)
    ]
    return folder / "run", shown, logs


def test_the_whole_launch(straight: tuple[Path, str, list[str]], drivers: PodDrivers) -> None:
    """From a cloud with nothing in it to a trained, evaluated and saved model."""
    folder, shown, logs = straight
    assert drivers.api.calls.count("CreateNode") == 1
    assert "8 x cpu in 4 process(es): dp 2 x fsdp 2 x tp 2" in shown
    for i, log in enumerate(logs):  # what the processes' own library says: the numbers of the hosts
        assert set(re.findall(r"Rank (\d) is connected to 3 peer ranks", log)) == {str(i)}
    records = metrics(folder)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[-1]["train/loss"] < 0.5 * records[0]["train/loss"]
    evaluated = [record["step"] for record in records if "val/loss_held" in record]
    assert evaluated == list(range(EVERY, STEPS + 1, EVERY))
    assert (folder / f"step_{STEPS}").is_dir()
    assert f"training {STEPS}/{STEPS}" in shown
    assert "cost: 8 chips" in shown


def test_faults_in_one_run(straight: tuple[Path, str, list[str]], drivers: PodDrivers) -> None:
    """A raylet with agent and worker, a network and the driver go, one after the other; every number is as if nothing had."""
    folder = drivers.write("faults", STEPS, EVERY)
    found: list[Recovery] = []
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(drivers.start(folder))
        for number, name in enumerate(("raylet killed", "link down"), 1):
            found.append(befall(drivers, run, FAULTS[name], number))
            sys.stdout.write(f"{found[-1]}\n")
            assert found[-1].seen_after_s < DETECTION_S
            assert all(drivers.environment(i)["JAX_PROCESS_ID"] == str(i) for i in range(4))
        run, recovery = kill_driver(drivers, run, 3, lambda: stack.enter_context(drivers.start(folder)))
        run.finish(timeout_s=END_S)
    records = same_numbers(straight[0], folder / "run")
    assert records[-1]["train/steps_redone"] == sum(one.steps_redone for one in found)
    assert len(records) - STEPS == records[-1]["train/steps_redone"]
