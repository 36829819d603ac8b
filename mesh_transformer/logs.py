"""What a run tells people: log lines, a progress bar, metric files."""

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol, Self

from mesh_transformer import liveness
from mesh_transformer.config import LoggingConfig

log = logging.getLogger("mesh_transformer")
Scalars = Mapping[str, float]
_MEGABYTE = 1_000_000
_LINE_EVERY_S = 10.0  # where no bar can be drawn
_FLUSH_S = 120.0  # how often TensorBoard's events go to the disk
_MAX_STEPS = 2**31  # a step is an int32 on the device


def set_up(level: int = logging.INFO) -> None:
    """Log lines of this package to standard error, with the time of day; other libraries only warn."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_BarFriendly("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    log.setLevel(level)


class _BarFriendly(logging.Formatter):
    """Clears the line first on a terminal, where a progress bar may stand."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "\r\x1b[K" + text if sys.stderr.isatty() else text


class Progress:
    """A bar with rate and ETA on a terminal, a plain line every few seconds otherwise (standard error)."""

    def __init__(
        self, what: str, total: int, *, unit: str, done: int = 0, quiet: bool = False, leave: bool = True
    ):
        from tqdm import tqdm

        self._plain = not sys.stderr.isatty()
        self._what, self._total, self._start = what, total, done
        self._began = self._printed = time.monotonic()
        self._quiet, self._leave = quiet, leave
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=what,
            unit=unit,
            bar_format="{desc} {n_fmt}/{total_fmt} |{bar}| eta {remaining}{postfix}",
            disable=quiet or self._plain,
            dynamic_ncols=True,
            leave=leave,
        )

    def update(self, done: int, **shown: str) -> None:
        """`done` units are finished; `shown` stands beside the count."""
        liveness.record_progress()
        details = "  ".join(f"{name} {value}" for name, value in shown.items())
        self._bar.set_postfix_str(details, refresh=False)
        self._bar.update(done - self._bar.n if not self._bar.disable else 0)
        now = time.monotonic()
        last = done >= self._total and self._leave
        if self._plain and not self._quiet and (now - self._printed >= _LINE_EVERY_S or last):
            self._printed = now
            rate = (done - self._start) / max(now - self._began, 1e-9)
            eta = timedelta(seconds=int((self._total - done) / rate)) if rate else "?"
            told = [f"{self._what} {done}/{self._total}", details, f"eta {eta}"]
            log.info("%s", "  ".join(filter(None, told)))

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


class Transfer:
    """Progress of so many bytes: done, rate and time left. `add` may be called from any thread."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._total = max(1, total_bytes)
        self._progress = Progress(what, -(-self._total // _MEGABYTE), unit="MB")
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()

    def add(self, n_bytes: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self._done += n_bytes
            rate = self._done / max(time.monotonic() - self._began, 1e-9) / _MEGABYTE
            whole = self._done >= self._total
            shown = -(-self._total // _MEGABYTE) if whole else self._done // _MEGABYTE
            self._progress.update(shown, rate=f"{rate:.0f} MB/s")


class Sink(Protocol):
    """Somewhere that metrics go."""

    def write(self, step: int, scalars: Scalars) -> None:
        """Record the metrics of one step."""

    def close(self) -> None:
        """Write what is still held back."""


class JsonLines:
    """One JSON object a step, appended to a file and flushed at once; a value that is not finite is null."""

    def __init__(self, path: str):
        self._file = open(path, "a+b")  # noqa: SIM115  (closed by close)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read() != b"\n":  # a killed run left half a line
                self._file.write(b"\n")

    def write(self, step: int, scalars: Scalars) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._file.write(json.dumps({"step": step, **values}).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: str) -> list[dict[str, Any]]:
    """The records of a metrics file, oldest first; lines that are none, such as one that a kill cut short, are left out."""
    if not os.path.exists(path):
        return []
    with open(path, "rb") as file:
        return [record for line in file if (record := _record(line)) is not None]


def cut_broken_end(path: str) -> None:
    """Cut from a metrics file the lines behind its last record, and say so."""
    if not os.path.exists(path):
        return
    end, broken = 0, b""
    with open(path, "r+b") as file:
        for line in file:
            if _record(line) is not None:
                end, broken = file.tell(), b""
            elif not broken:
                broken = line.strip()
        if broken:
            file.truncate(end)
            shown = broken[:60].decode("ascii", "backslashreplace")
            log.warning("%s ended with no record of a step, which is cut off: %s", path, shown)


def _record(line: bytes) -> dict[str, Any] | None:
    """The record on a line of a metrics file: a step, and numbers or null; None if it holds anything else."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            return None
        if not all(value is None or _is_number(value) for value in record.values()):
            return None
        counts = (record["step"], record.get("train/steps_redone") or 0)
        return record if all(0 <= count < _MAX_STEPS for count in counts) else None
    except (ValueError, OverflowError, RecursionError):
        return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


class TensorBoard:
    """TensorBoard event files, written in the caller's thread: tensorboardX's own dies at a full disk, and its queue blocks."""

    def __init__(self, folder: str):
        from tensorboardX.event_file_writer import EventsWriter

        os.makedirs(folder, exist_ok=True)
        self._writer = EventsWriter(os.path.join(folder, "events"))
        self._flushed = time.monotonic()

    def write(self, step: int, scalars: Scalars) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for name, value in scalars.items():
            self._writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
        if time.monotonic() - self._flushed > _FLUSH_S:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases; without an account WANDB_MODE=offline keeps the run on disk."""

    def __init__(self, config: LoggingConfig, whole_config: dict[str, Any], folder: str, run_id: str):
        import wandb

        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
            raise RuntimeError("not logged in; `wandb login` does that, WANDB_MODE=offline does without")
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.name,
            notes=config.comment,
            config=whole_config,
            dir=folder,
            id=run_id,
            resume="allow",
        )

    def write(self, step: int, scalars: Scalars) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        with liveness.service_call():
            self._run.finish()


def open_sinks(config: LoggingConfig, whole_config: dict[str, Any], folder: str, run_id: str) -> list[Sink]:
    """The metric sinks of a run: always metrics.jsonl; TensorBoard and W&B as configured.

    W&B missing or logged out is a warning: the run goes on without it.
    """
    sinks: list[Sink] = [JsonLines(os.path.join(folder, "metrics.jsonl"))]
    if config.tensorboard:
        sinks.append(TensorBoard(os.path.join(folder, "tensorboard")))
    if config.wandb_project:
        try:
            with liveness.service_call():
                sinks.append(WandB(config, whole_config, folder, run_id))
        except Exception as error:  # noqa: BLE001  (wandb raises its own kinds; none may stop the run)
            log.warning(
                "Weights & Biases is not available (%s): going on without it", str(error).split("\n")[0]
            )
    return sinks
