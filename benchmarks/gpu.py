"""Figures of one GPU: rates, attention, train step, decode, and the peers in torch. Needs jax with CUDA and this
checkout.

    python benchmarks/gpu.py --out gpu.jsonl            # repeat it until it says that all cases are done
    python benchmarks/gpu.py --out gpu.jsonl --only train --only decode
    python benchmarks/gpu.py --out gpu.jsonl --report   # the rows of a file as tables in Markdown
    python benchmarks/gpu.py --out toy.jsonl --tiny     # every case at toy size on CPU, to try the script

A call starts no case after 480 s and ends before 540 s. Each case is a process with a limit of its own: one that fails
or runs out of memory ends alone. The file gets a line of JSON for each case: case, device, versions, seconds, and
`figure`; or `failed` with `error`, `skipped` (it does not fit the memory, by arithmetic), `absent` (a package is not
installed; a later call looks again) or `interrupted` (the call ended; the next one runs it again). The next call goes
on after the cases that the file has for this device.
"""

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import common
import gpu_plan
import gpu_workers
import jax
from gpu_plan import Case, Device, Row

from mesh_transformer.errors import UserError
from mesh_transformer.runtime import cli

STOP_S, END_S = 480.0, 540.0
# of the end of a call, to end the process of a case
MARGIN_S = 5.0
# of the standard error of a process: what is searched, and what is kept
TAIL_BYTES, KEPT = 1 << 17, 600
NO_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "OutOfMemoryError", "MemoryError")
# a GPU that nothing else uses; torch frees what other sizes left
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "0",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.97",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
# of a case and the seconds that it may take: its fields of the row
Start = Callable[[Case, float], dict[str, Any]]


def main() -> None:
    """Measure, or print the table of a file."""
    made = common.parser(__doc__, config=None, rounds=None)
    made.add_argument("--out", default="gpu.jsonl", metavar="FILE", help="default: %(default)s")
    made.add_argument("--only", action="append", metavar="WORDS", help="cases whose names begin so; may be repeated")
    made.add_argument("--tiny", action="store_true", help="every case at toy size on CPU, in one process")
    made.add_argument("--report", action="store_true", help="print the rows of the file as tables in Markdown")
    arguments = made.parse_args()
    if arguments.report:
        sys.stdout.write(report(read_rows(Path(arguments.out))))
        return
    began = time.monotonic()
    if arguments.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        jax.config.update("jax_platforms", "cpu")
    start = in_this_process if arguments.tiny else start_process
    device = find_device(start, arguments.tiny)
    common.say(f"device: {device.kind}; {device.versions}")
    plan = functools.partial(gpu_plan.plan, device, tiny=arguments.tiny)
    left = measure(Path(arguments.out), device, plan, start, lambda: time.monotonic() - began, arguments.only)
    common.say(f"{left} cases are left: give the same command again" if left else "all cases are done")


def find_device(start: Start, tiny: bool) -> Device:
    """The device that a process of a case sees.

    Raises:
        UserError: it is no GPU, and `tiny` is not set.
    """
    outcome = start(Case("device", "device"), 120.0)
    if "figure" not in outcome:
        raise UserError(f"the device cannot be used: {outcome.get('error') or 'no answer in 120 s'}")
    device = Device(**outcome["figure"])
    if device.platform != "gpu" and not tiny:
        raise UserError(
            f"no GPU found (the device is {device.kind}): install jax with CUDA (pip install -e '.[cuda]') on a "
            "machine with an NVIDIA GPU, or try the script with --tiny"
        )
    return device


def measure(
    out: Path,
    device: Device,
    plan: Callable[[Sequence[Row]], list[Case]],
    start: Start,
    seconds: Callable[[], float],
    only: Sequence[str] | None = None,
) -> int:
    """Run the cases that the file does not have, in order, until STOP_S. Returns how many are left.

    Args:
        plan: the cases, given the rows of the device.
        seconds: seconds since the call began.
    """
    handled: set[str] = set()
    while True:
        rows = [row for row in read_rows(out) if row["device"] == device.kind]
        done = {row["case"] for row in rows if not row.get("absent") and not row.get("interrupted")}
        cases = chosen(plan(rows), only)
        left = [case for case in cases if case.name not in done]
        case = next((one for one in left if one.name not in handled), None)
        if case is None or seconds() > STOP_S:
            return sum(one.instead is None for one in left)
        handled.add(case.name)
        began, most = seconds(), min(case.limit, END_S - MARGIN_S - seconds())
        if case.instead is None:
            common.say(f"{began:.0f} s: {case.name}")
            outcome = start(case, most)
        else:
            outcome = dict(case.instead)
        if outcome.get("failed") == "timeout" and most < case.limit:
            outcome = {"interrupted": True}
        row = {"case": case.name, "device": device.kind, "versions": device.versions}
        row |= {"seconds": round(seconds() - began, 1), **outcome}
        if not any(old["case"] == case.name and old.get("absent") for old in rows) or "absent" not in outcome:
            append(out, row)
            common.say(f"{seconds():.0f} s: {case.name}: {json.dumps(outcome)}")


def chosen(cases: list[Case], only: Sequence[str] | None) -> list[Case]:
    """The cases whose names begin with the words of an element of `only`; None: all.

    Raises:
        UserError: no name begins with an element.
    """
    found: list[Case] = []
    for words in only or ():
        some = [case for case in cases if f"{case.name} ".startswith(f"{words} ")]
        if not some:
            kinds = ", ".join(dict.fromkeys(case.name.split()[0] for case in cases))
            raise UserError(f"--only {words!r}: no case begins so; cases begin with one of {kinds}")
        found += some
    return [case for case in cases if case in found] if only else cases


def in_this_process(case: Case, _: float) -> dict[str, Any]:
    """Call the worker of a case here, without a limit of time."""
    return {"figure": getattr(gpu_workers, case.worker)(argparse.Namespace(**case.arguments))}


def start_process(case: Case, seconds: float) -> dict[str, Any]:
    """Run a case in a process of its own, and end it with all that it started after so many seconds."""
    given = json.dumps({**case.arguments, "worker": case.worker})
    command = [sys.executable, str(case.program), "--worker", given]
    environment = {**ENVIRONMENT, **os.environ, **case.environment}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, cwd=common.REPO, env=environment, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _outcome(code, _tail(output), _tail(errors))


def _outcome(code: int | None, output: str, errors: str) -> dict[str, Any]:
    if code == 0:
        with contextlib.suppress(ValueError, IndexError):
            return {"figure": json.loads(output.splitlines()[-1])}
    error = errors.strip()[-KEPT:]
    if code is None:
        return {"failed": "timeout", "error": error}
    if any(words in errors for words in NO_MEMORY):
        return {"failed": "out of memory", "error": error}
    return {"failed": "no figure" if code == 0 else f"exit code {code}", "error": error}


def _tail(file: BinaryIO) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return file.read().decode(errors="replace")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file. A line that a killed call left incomplete is no row."""
    rows = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and {"case", "device"} <= row.keys():
                    rows.append(row)
    return rows


def append(path: Path, row: Row) -> None:
    """Add a row to a file, on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(json.dumps(row).encode() + b"\n")


def report(rows: Sequence[Row]) -> str:
    """Tables in Markdown: one for each device and kind of case, with the last row of each case."""
    last = {(row["device"], row["case"]): row for row in rows}
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (device, case), row in last.items():
        cells = {"case": case, **row.get("figure", {})}
        predicted = last.get((device, f"preflight {case}"), {}).get("figure", {})
        if "peak_gib" in predicted:
            cells["preflight_gib"] = predicted["peak_gib"]
        words = [name for name in ("failed", "skipped", "reason") if name in row]
        cells |= {"": ", ".join(row[name] for name in words)} if words else {}
        tables.setdefault((device, case.split()[0]), []).append(cells)
    return "\n".join(line for (device, kind), cells in tables.items() for line in _table(f"{device}: {kind}", cells))


def _table(title: str, rows: Sequence[Row]) -> Iterator[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield f"### {title}\n"
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(str(row.get(name, '')) for name in columns)} |"
    yield ""


if __name__ == "__main__":
    cli.run(main)
