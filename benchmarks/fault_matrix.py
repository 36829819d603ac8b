"""Injects every fault of docs/reliability.md into a run on a pod of local hosts; measures the time to detect and to
recover from each.

    python benchmarks/fault_matrix.py [--faults "worker killed" ...] > matrix.json

This needs root, and what tests/pod needs. A run without faults comes first; all metrics of the other run must equal its
metrics. The output is JSON on standard output, one line for each fault and one for both runs.
"""

import contextlib
import functools
import re
import sys
import time
from dataclasses import asdict

from common import emit, parser, report, say
from support.driving import Driver, same_numbers
from support.faults import DRIVER_KILLED, EVERY, FAULTS, kill_driver, middle, recover_from
from support.gate import Gate
from support.hosts import PodOfHosts, why_not
from support.pod_driver import PodDrivers, pod_drivers


def main() -> None:
    """Run both runs and print the measurements."""
    names = [*FAULTS, DRIVER_KILLED]
    made = parser(__doc__, config=None, rounds=None)
    made.add_argument("--faults", nargs="*", choices=names, default=names, metavar="NAME")
    arguments = made.parse_args()
    if why_not():
        sys.exit(why_not())
    steps = EVERY * (len(arguments.faults) + 2)
    with PodOfHosts(4) as hosts, pod_drivers(hosts) as drivers:
        straight, folder = drivers.write("straight", steps, EVERY), drivers.write("faults", steps, EVERY)
        with drivers.start(straight) as run:
            run.finish()
        emit({"launch": "of a new pod", **_breakdown(run)})
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            gate = Gate(folder / "gate", middle(1))
            run = stack.enter_context(drivers.start(folder, *gate.options))
            run.wait_for_line("training ", 0)
            emit({"launch": "again", **_breakdown(run)})
            for number, name in enumerate(arguments.faults, 1):
                run = _recover(drivers, run, gate, name, number, stack)
            run.finish()
        records = same_numbers(straight / "run", folder / "run")
        report(
            {
                # `same_numbers` raises otherwise
                "equal_in_every_bit": True,
                "steps": steps,
                "steps_redone": records[-1]["train/steps_redone"],
                "seconds": round(time.monotonic() - began, 1),
            }
        )


def _recover(
    drivers: PodDrivers, run: Driver, gate: Gate, name: str, number: int, stack: contextlib.ExitStack
) -> Driver:
    if name == DRIVER_KILLED:
        start = functools.partial(drivers.start, run.folder, *gate.options)
        run, recovery = kill_driver(drivers, run, gate, number, lambda: stack.enter_context(start()))
    else:
        recovery = recover_from(drivers, run, gate, FAULTS[name], number)
    emit(asdict(recovery))
    say(f"{name}: detected after {recovery.detected_after_s} s, next step {recovery.next_step_after_s} s later")
    return run


def _breakdown(run: Driver) -> dict[str, float]:
    """The times of the driver's phases, in seconds since the start of the command."""
    marks = {"hosts_up": "is up: ", "mesh_formed": "parameters;", "first_step": "training "}
    found = {}
    for name, part in marks.items():
        found[name] = next((round(at, 1) for at, line in run.lines if part in line), -1.0)
    launched = next(line.partition("is up: ")[2] for _, line in run.lines if "is up: " in line)
    parts = re.findall(r"([a-z][a-z ]*) ([0-9.]+) s", launched)
    return {**found, **{name: float(value) for name, value in parts}}


if __name__ == "__main__":
    main()
