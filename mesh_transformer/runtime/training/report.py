"""The metrics of a run: read from the device one step late, and written to sinks, a progress bar and a plot."""

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
    """The metrics of a step that are not written yet.

    Args:
        metrics: the metrics on the device.
        scalars: the metrics on the host. Empty until `MetricsReporter.settle`.
    """

    step: int
    metrics: Any
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)


class MetricsReporter:
    """Accepts the metrics of each step on the device, and writes the metrics of the step before.

    So the device does not wait for the host, except in `settle`, which precedes each validation and save.

    Args:
        steps_redone: the steps that all restarts together repeated. It is written with the metrics of each step.
        stop: whether a step with a value that is not finite ends the run.
    """

    def __init__(self, sinks: Sequence[Sink], progress: Progress, tokens_per_step: int, steps_redone: int, stop: bool):
        self._sinks, self._progress = sinks, progress
        self._tokens_per_step, self._steps_redone, self._stop = tokens_per_step, steps_redone, stop
        self._pending: _Pending | None = None
        self._ready = time.monotonic()
        # the newest loss on each validation set
        self.val_loss: dict[str, float] = {}

    def push(self, step: int, metrics: Any) -> None:
        """Add the metrics of `step`. Its computation may still run."""
        self._write()
        self._pending = _Pending(step, metrics)

    def add(self, scalars: Scalars) -> None:
        """Add scalars, such as those of a validation, to the newest step after `settle`."""
        if self._pending is None:
            raise AssertionError("add() before push()")
        self._pending.scalars.update(scalars)
        losses = {name: value for name, value in scalars.items() if name.startswith(_VAL_LOSS)}
        self.val_loss |= {name.removeprefix(_VAL_LOSS): value for name, value in losses.items()}

    def settle(self) -> None:
        """Wait for the newest step and check that its metrics are finite.

        Raises:
            RunError: they are not, and `stop` is set.
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
        """Exclude a time, such as that of a validation, from the tokens per second."""
        began = time.monotonic()
        yield
        self._ready += time.monotonic() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write the pending metrics, unless the run failed, and close the sinks."""
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
            log.warning("%s: not finite, so the update is skipped", what)
            return
        self._emit(pending)
        raise RunError(
            f"{what}: not finite. The newest checkpoint is from before this step. Lower optimizer.lr, or skip such steps "
            f"with --set optimizer.nonfinite=skip, and run the command again to resume from that checkpoint"
        )

    def _emit(self, pending: _Pending) -> None:
        for sink in self._sinks:
            sink.write(pending.step, pending.scalars)
        loss, rate = pending.scalars["train/loss"], pending.scalars["train/tokens_per_sec"]
        self._progress.update(pending.step, loss=f"{loss:.4f}", **{"tokens/s": f"{rate:,.0f}"})


def plot_losses(folder: str) -> None:
    """Plot the training and validation losses in `folder`/metrics.jsonl to `folder`/loss.png."""
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
