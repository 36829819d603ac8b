"""The output of a run: log lines, a progress bar and metric files."""

import copy
import html
import json
import logging
import math
import os
import struct
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from mesh_transformer import liveness
from mesh_transformer.errors import RunError, UserError, is_disk_full, shown

if TYPE_CHECKING:
    # the parsers of arguments use this module, and the config takes a second
    from mesh_transformer.config import LoggingConfig

log = logging.getLogger("mesh_transformer")
Scalars = Mapping[str, float]
_MEGABYTE = 1_000_000
# interval of progress lines, without a terminal
_LINE_EVERY_S = 10.0
# interval at which TensorBoard's events are flushed
_FLUSH_S = 120.0
# TensorBoard's number for a picture with red, green, blue and alpha
_RGBA = 4
# a step is an int32 on the device
_MAX_STEPS = 2**31


def set_up(level: int = logging.INFO) -> None:
    """Log to standard error with the time of day: this package from `level` on, other libraries from warnings on. The
    log of a program: it changes settings of the process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_BarFriendly("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    log.setLevel(level)
    Progress.bars = True
    _silence_libraries()


def _silence_libraries() -> None:
    """Drop Orbax's log lines for each file, and its threads' log lines about a failed save, whose error is raised."""
    for library in ("absl", "fsspec"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("absl").addFilter(_below_error)
    # the first failed write is raised; asyncio logs each of the others
    logging.getLogger("asyncio").addFilter(_not_disk_full)
    # when a write fails, Orbax closes its event loop, and TensorStore's remaining writes fail to report to it
    if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
        sys.unraisablehook = _WithoutClosedLoops(sys.unraisablehook)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def _not_disk_full(record: logging.LogRecord) -> bool:
    return not (record.exc_info and is_disk_full(record.exc_info[1]))


class _WithoutClosedLoops:
    """A `sys.unraisablehook` that leaves out errors of closed event loops."""

    def __init__(self, otherwise: Callable[["sys.UnraisableHookArgs"], object]):
        self._otherwise = otherwise

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._otherwise(unraisable)


class _BarFriendly(logging.Formatter):
    """On a terminal, clears the line first, because it may show a progress bar. Control characters are escaped, and the
    line feeds in arguments of a message, which may be names from strangers."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple):
            # other handlers get the record as it is
            record = copy.copy(record)
            record.args = tuple(map(_escaped, record.args or ()))
        text = "\n".join(map(shown, super().format(record).split("\n")))
        return "\r\x1b[K" + text if sys.stderr.isatty() else text


def _escaped(argument: object) -> object:
    """An argument of a message, on one line if it is a text, a path or the error of a library."""
    if isinstance(argument, str | os.PathLike) or (
        isinstance(argument, Exception) and not isinstance(argument, UserError | RunError)
    ):
        return _OneLine(argument)
    return argument


class _OneLine:
    """An argument whose text is escaped. Its repr() is as before: repr() escapes already."""

    def __init__(self, argument: object):
        self._argument = argument

    def __str__(self) -> str:
        return shown(str(self._argument))

    def __repr__(self) -> str:
        return repr(self._argument)


class Progress:
    """A bar with rate and ETA on a terminal after `set_up`, else a plain line in the log every few seconds.

    The rate counts the time after the first update, because the time before includes compilation. Without a `total`
    it shows only the count.
    """

    # a program that uses this package prints what it wants to
    bars = False

    @classmethod
    def shown(cls) -> bool:
        """Whether a bar may be shown: on the terminal of a command."""
        return cls.bars and sys.stderr.isatty()

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        unit: str,
        done: int = 0,
        quiet: bool = False,
        leave: bool = True,
    ):
        from tqdm import tqdm

        self._plain = not self.shown()
        self._what, self._total = what, total
        # units and time of the first update
        self._first: tuple[int, float] | None = None
        self._printed = time.monotonic()
        self._quiet, self._leave = quiet, leave
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=what,
            unit=unit,
            bar_format=self._bar_format("?"),
            disable=quiet or self._plain,
            dynamic_ncols=True,
            leave=leave,
        )

    def update(self, done: int, **shown: str) -> None:
        """Show that `done` units are finished, and the values `shown`."""
        liveness.record_progress()
        details = "  ".join(f"{name} {value}" for name, value in shown.items())
        now = time.monotonic()
        is_first = self._first is None
        self._first = self._first or (done, now)
        eta = self._eta(done, now)
        self._bar.bar_format = self._bar_format(eta)
        self._bar.set_postfix_str(details, refresh=False)
        self._bar.update(done - self._bar.n if not self._bar.disable else 0)
        last = self._total is not None and done >= self._total and self._leave
        due = now - self._printed >= _LINE_EVERY_S or last
        if due or is_first:
            self._printed = now
        if due and self._plain and not self._quiet:
            parts = [f"{self._what} {done}", details]
            if self._total is not None:
                parts = [f"{self._what} {done}/{self._total}", details, f"eta {eta}"]
            log.info("%s", "  ".join(filter(None, parts)))

    def begin(self, what: str) -> None:
        """Show what the next unit is: beside the bar, or as a plain line."""
        if not self._plain:
            self._bar.set_postfix_str(what)
        elif not self._quiet:
            log.info("%s: %s", self._what, what)

    def exclude(self, seconds: float) -> None:
        """Do not count these last seconds for the rate."""
        if self._first is not None:
            self._first = (self._first[0], self._first[1] + seconds)

    def close(self) -> None:
        """Stop updating the bar."""
        self._bar.close()

    def _eta(self, done: int, now: float) -> str:
        """The time left; "?" before the second update."""
        if self._total is None or self._first is None or done <= self._first[0]:
            return "0:00:00" if done == self._total else "?"
        rate = (done - self._first[0]) / max(now - self._first[1], 1e-9)
        return str(timedelta(seconds=int((self._total - done) / rate)))

    def _bar_format(self, eta: str) -> str:
        if self._total is None:
            return "{desc} {n_fmt}{postfix}"
        return f"{{desc}} {{n_fmt}}/{{total_fmt}} |{{bar}}| eta {eta}{{postfix}}"


def step_summary(scalars: Scalars) -> dict[str, str]:
    """What a progress line shows of the metrics of a training step: loss, tokens/s, and the MFU if it is known.

    A record of a validation only, such as step 0 of a fine-tuning, shows nothing.
    """
    if "train/loss" not in scalars:
        return {}
    shown = {"loss": f"{scalars['train/loss']:.4f}", "tokens/s": f"{scalars['train/tokens_per_sec']:,.0f}"}
    if "train/mfu" in scalars:
        shown["mfu"] = f"{scalars['train/mfu']:.0%}"
    return shown


class Transfer:
    """Progress of a transfer of `total_bytes`: bytes done, rate and time left. Any thread may call `add`."""

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
        """`n_bytes` more are done."""
        with self._lock:
            self._done += n_bytes
            rate = self._done / max(time.monotonic() - self._began, 1e-9) / _MEGABYTE
            complete = self._done >= self._total
            shown = -(-self._total // _MEGABYTE) if complete else self._done // _MEGABYTE
            self._progress.update(shown, rate=f"{rate:.0f} MB/s")


class Sink:
    """A destination of metrics. This base class drops them; a subclass overrides the methods for what it records."""

    def write(self, step: int, scalars: Scalars) -> None:
        """Record the metrics of one step."""

    def picture(self, step: int, name: str, path: str) -> None:
        """Record the PNG at `path`. The file may change after the call."""

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text."""

    def close(self) -> None:
        """Write buffered metrics."""


class JsonLines(Sink):
    """Appends one JSON object per step to a file and flushes it at once. A value that is not finite is null. The file
    has no pictures and no texts."""

    def __init__(self, path: str):
        # `close` closes it
        self._file = open(path, "a+b")  # noqa: SIM115
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            # a killed run may leave half a line
            if self._file.read() != b"\n":
                self._file.write(b"\n")

    def write(self, step: int, scalars: Scalars) -> None:
        self.append(step, {name: value if math.isfinite(value) else None for name, value in scalars.items()})

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a record of `step` with these values, which JSON can hold."""
        self._file.write(json.dumps({"step": step, **values}).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number, and no boolean."""
    return type(value) in (int, float) and math.isfinite(value)


def read_json_lines(path: str, value: Callable[[Any], bool] = is_number) -> list[dict[str, Any]]:
    """The records of a metrics file, oldest first, without invalid lines such as one that a kill cut short.

    Args:
        value: whether a value may stand in a record, in addition to null.
    """
    if not os.path.exists(path):
        return []
    with open(path, "rb") as file:
        return [record for line in file if (record := _record(line, value)) is not None]


def cut_broken_end(path: str, value: Callable[[Any], bool] = is_number) -> None:
    """Remove the lines after the last record of a metrics file, with a warning. `value` is as in `read_json_lines`.

    Raises:
        UserError: the file has complete lines but no record, so it is not a metrics file.
    """
    if not os.path.exists(path):
        return
    end, broken = 0, b""
    with open(path, "r+b") as file:
        for line in file:
            if _record(line, value) is not None:
                end, broken = file.tell(), b""
            elif not broken:
                broken = line.strip()
        # a kill cuts a record short: the line has no end
        if broken and end == 0 and line.endswith(b"\n"):
            raise UserError(
                f"{path} has no record of a step, so it is not the metrics file of a run: choose another "
                "checkpoint.model_dir, or move the file away"
            )
        if broken:
            file.truncate(end)
            shown = broken[:60].decode("ascii", "backslashreplace")
            log.warning("%s ended with a line that is not a record of a step; the line is removed: %s", path, shown)


def _record(line: bytes, is_value: Callable[[Any], bool]) -> dict[str, Any] | None:
    """The record on a line of a metrics file: a step, and values or null. None for a malformed line."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            return None
        values = [value for name, value in record.items() if name != "step"]
        if not all(value is None or is_value(value) for value in values):
            return None
        counts = (record["step"], record.get("train/steps_redone") or 0)
        return record if all(0 <= count < _MAX_STEPS for count in counts) else None
    except (ValueError, OverflowError, RecursionError):
        return None


class TensorBoard(Sink):
    """TensorBoard event files, written in the caller's thread: tensorboardX's thread dies if the disk is full, and its
    queue blocks."""

    def __init__(self, folder: str):
        from tensorboardX.event_file_writer import EventsWriter

        os.makedirs(folder, exist_ok=True)
        self._writer = EventsWriter(os.path.join(folder, "events"))
        self._flushed = time.monotonic()

    def write(self, step: int, scalars: Scalars) -> None:
        from tensorboardX.summary import scalar

        for name, value in scalars.items():
            self._add(step, scalar(name, value))

    def picture(self, step: int, name: str, path: str) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        with open(path, "rb") as file:
            png = file.read()
        # the header of a PNG has its width and height in bytes 16 to 23
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=_RGBA)
        self._add(step, Summary(value=[Summary.Value(tag=name, image=image)]))

    def text(self, step: int, name: str, text: str) -> None:
        from tensorboardX import summary

        # TensorBoard shows Markdown: an indented text is shown as it is
        self._add(step, summary.text(name, textwrap.indent(text, "    ", lambda _: True)))

    def _add(self, step: int, summary: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._flushed > _FLUSH_S:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()


class WandB(Sink):
    """Weights & Biases. WANDB_MODE=offline keeps the run on disk and needs no account."""

    def __init__(self, config: "LoggingConfig", whole_config: dict[str, Any], folder: str, run_id: str):
        import wandb

        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
            raise RuntimeError("not logged in: run `wandb login`, or set WANDB_MODE=offline")
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

    def picture(self, step: int, name: str, path: str) -> None:
        import wandb

        self._run.log({name: wandb.Image(path)}, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        import wandb

        self._run.log({name: wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def close(self) -> None:
        with liveness.service_call():
            self._run.finish()


def open_sinks(config: "LoggingConfig", whole_config: dict[str, Any], folder: str, run_id: str) -> list[Sink]:
    """The metric sinks of a run: always metrics.jsonl; TensorBoard and W&B as configured.

    If W&B is not installed or not logged in, the run logs a warning and continues without it.
    """
    sinks: list[Sink] = [JsonLines(os.path.join(folder, "metrics.jsonl"))]
    if config.tensorboard:
        sinks.append(TensorBoard(os.path.join(folder, "tensorboard")))
    if config.wandb_project:
        try:
            with liveness.service_call():
                sinks.append(WandB(config, whole_config, folder, run_id))
        # wandb has its own exceptions; none may stop the run
        except Exception as error:  # noqa: BLE001
            log.warning(
                "Weights & Biases is not available (%s): the run continues without it",
                str(error).split("\n")[0],
            )
    return sinks
