"""The metrics of a run: read one step late, written to every sink, shown on the bar and as a plot."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import jax

from mesh_transformer.errors import RunError
from mesh_transformer.logs import Progress, Scalars, Sink, log, read_json_lines

_VAL_LOSS = "val/loss_"


@dataclasses.dataclass
class _Pending:
    step: int
    metrics: Any  # on the device
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)  # empty until settled


class MetricsReporter:
    """Takes the device's metrics of each step and writes those of the step before.

    So the device never waits for the host, but for `settle`, which a validation or a save calls first.

    Args:
        steps_redone: of all restarts, which goes with each step's metrics.
        stop: whether a step that is not finite ends the run.
    """

    def __init__(
        self, sinks: Sequence[Sink], progress: Progress, tokens_per_step: int, steps_redone: int, stop: bool
    ):
        self._sinks, self._progress = sinks, progress
        self._tokens_per_step, self._steps_redone, self._stop = tokens_per_step, steps_redone, stop
        self._pending: _Pending | None = None
        self._ready = time.monotonic()
        self.val_loss: dict[str, float] = {}  # the newest of each validation set

    def push(self, step: int, metrics: Any) -> None:
        """The metrics of `step`, whose computation has been dispatched."""
        self._write()
        self._pending = _Pending(step, metrics)

    def add(self, scalars: Scalars) -> None:
        """More numbers about the newest step, which is settled, such as its validation."""
        if self._pending is None:
            raise AssertionError("add() before push()")
        self._pending.scalars.update(scalars)
        losses = {name: value for name, value in scalars.items() if name.startswith(_VAL_LOSS)}
        self.val_loss |= {name.removeprefix(_VAL_LOSS): value for name, value in losses.items()}

    def settle(self) -> None:
        """Wait for the newest step and check that it is finite.

        Raises:
            RunError: it is not, and the run is to stop for that.
        """
        if self._pending is None or self._pending.scalars:
            return
        values = jax.device_get(self._pending.metrics)
        now = time.monotonic()
        rate = self._tokens_per_step / max(now - self._ready, 1e-9)
        self._ready = now
        finite, skipped = bool(values.pop("finite")), int(values.pop("skipped"))
        scalars = {name: float(value) for name, value in sorted(values.items())}
        scalars |= {"train/tokens_per_sec": rate, "train/steps_redone": self._steps_redone}
        if skipped:
            scalars["train/skipped_steps"] = skipped
        self._pending.scalars = scalars
        if not finite:
            self._not_finite(self._pending)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time that does not count as training, such as a validation."""
        began = time.monotonic()
        yield
        self._ready += time.monotonic() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write what is pending unless the run failed, and close the sinks."""
        if kind is None:
            self._write()
        self._progress.close()
        for sink in self._sinks:
            sink.close()

    def _write(self) -> None:
        self.settle()
        if self._pending is not None:
            self._emit(self._pending)

    def _not_finite(self, pending: _Pending) -> None:
        names = ("loss", "grad_norm", "param_norm")
        values = ", ".join(f"{name} {pending.scalars[f'train/{name}']}" for name in names)
        what = f"step {pending.step}: {values}"
        if not self._stop:
            log.warning("%s: not finite, update skipped", what)
            return
        self._emit(pending)
        raise RunError(
            f"{what}: not finite; the last checkpoint is untouched. Lower optimizer.lr, or skip such steps "
            f"with --set optimizer.nonfinite=skip, and start again to go on from that checkpoint"
        )

    def _emit(self, pending: _Pending) -> None:
        for sink in self._sinks:
            sink.write(pending.step, pending.scalars)
        loss, rate = pending.scalars["train/loss"], pending.scalars["train/tokens_per_sec"]
        self._progress.update(pending.step, loss=f"{loss:.4f}", **{"tokens/s": f"{rate:,.0f}"})


def plot_losses(folder: str) -> None:
    """Draw the training and validation losses of `folder`/metrics.jsonl as `folder`/loss.png."""
    from matplotlib.figure import Figure

    records = {record["step"]: record for record in read_json_lines(os.path.join(folder, "metrics.jsonl"))}
    names = sorted({name for record in records.values() for name in record if name.startswith("val/loss")})
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in ["train/loss", *names]:
        points = [(step, r[name]) for step, r in sorted(records.items()) if r.get(name) is not None]
        marker = "" if name == "train/loss" else "o"
        axes.plot(*zip(*points, strict=True), label=name, marker=marker, linewidth=1) if points else None
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="Training")
    axes.grid(alpha=0.3)
    axes.legend()
    path = os.path.join(folder, "loss.png")
    figure.savefig(path + ".tmp", dpi=120, format="png")
    os.replace(path + ".tmp", path)
