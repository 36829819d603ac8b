"""The metrics of a run: read from the device one step late, and written to sinks and a progress bar."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import jax

from mesh_transformer import accelerators
from mesh_transformer.errors import RunError, set_options
from mesh_transformer.logs import Progress, Scalars, Sink, log, step_summary
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.spec.flops import flops_per_token

_VAL_LOSS = "val/loss_"


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The work of a step.

    Args:
        tokens: tokens of a step, over the whole mesh.
        tflop_per_device: model FLOPs of a step (`spec.flops`) divided by the number of devices, in units of 10^12.
        peak_tflops: the peak rate of a device, TFLOP/s; None if it is unknown.
    """

    tokens: int
    tflop_per_device: float
    peak_tflops: float | None

    @classmethod
    def of(cls, session: Session) -> Self:
        """The work of a training step of `session`, and the peak rate of its devices."""
        tokens, decoder = session.tokens_per_step, session.placement.model.decoder
        tflop = flops_per_token(decoder, session.config.seq) * tokens / jax.device_count() / 1e12
        accelerator = accelerators.of_device(jax.devices()[0].device_kind)
        return cls(tokens, tflop, accelerator.peak_tflops if accelerator else None)

    def rates(self, seconds: float) -> dict[str, float]:
        """Tokens per second, TFLOP/s of a device and, if the peak is known, the MFU (0 to 1) of a step of `seconds`."""
        tflops = self.tflop_per_device / seconds
        rates = {"train/tokens_per_sec": self.tokens / seconds, "train/tflops_per_device": tflops}
        return rates if self.peak_tflops is None else {**rates, "train/mfu": tflops / self.peak_tflops}


class Goodput:
    """The share of the wall time of this process that it spent in steps that count.

    A step takes the time from the end of the step before to its own end. This includes the wait for its batch, and
    excludes validations and saves between the two. A step does not count if it is the first step of the process,
    because its time includes the compilation, if an earlier process has logged it, or if its update is skipped.

    Args:
        began: when the process began to train, by `time.monotonic`.
        start_step: the step after which the process starts.
        logged_step: the newest step that an earlier process has logged.
    """

    def __init__(self, began: float, start_step: int, logged_step: int):
        self._began = began
        self._last_uncounted = max(start_step + 1, logged_step)
        self._counted_s = 0.0

    def add(self, step: int, seconds: float, now: float, *, updated: bool) -> float:
        """Add a step that took `seconds` and ended at `now`. Returns the share up to now, 0 to 1."""
        if updated and step > self._last_uncounted:
            self._counted_s += seconds
        return self._counted_s / max(now - self._began, 1e-9)


@dataclasses.dataclass
class _Pending:
    """The metrics of a step that are not written yet.

    Args:
        metrics: the metrics on the device.
        data: the tokens and passes of the sources (`feeds.source_scalars`).
        scalars: the metrics on the host. Empty until `MetricsReporter.settle`.
    """

    step: int
    metrics: Any
    data: Scalars = dataclasses.field(default_factory=dict)
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)


class MetricsReporter:
    """Accepts the metrics of each step on the device, and writes the metrics of the step before.

    So the device does not wait for the host, except in `settle`, which precedes each validation and save.

    Args:
        work: the work of each step.
        goodput: gets the time of each step.
        steps_redone: the steps that all restarts together repeated. It is written with the metrics of each step.
        stop: whether a step with a value that is not finite ends the run.
        sources: the names of the sources of a mixture.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        progress: Progress,
        work: StepWork,
        goodput: Goodput,
        steps_redone: int,
        stop: bool,
        sources: Sequence[str] = (),
    ):
        self._sinks, self._progress, self._work, self._goodput = sinks, progress, work, goodput
        self._steps_redone, self._stop, self._sources = steps_redone, stop, sources
        self._pending: _Pending | None = None
        self._ready = time.monotonic()
        # the newest loss on each validation set
        self.val_loss: dict[str, float] = {}

    def push(self, step: int, metrics: Any, data: Scalars) -> None:
        """Add the metrics of `step`, whose computation may still run, and the tokens and passes of the sources."""
        self._write()
        self._pending = _Pending(step, metrics, data)

    def reopen(self, step: int, scalars: Scalars) -> None:
        """Begin with a step that an earlier process has written with these scalars, so that `add` completes them. Step
        0 has none."""
        self._pending = _Pending(step, None, scalars={**scalars, "train/steps_redone": self._steps_redone})

    def add(self, scalars: Scalars) -> None:
        """Add scalars, such as the losses of a validation, to the newest step after `settle`, or to the step of
        `reopen`."""
        if self._pending is None:
            raise AssertionError("add() before push() and reopen()")
        self._pending.scalars.update(scalars)
        losses = {name: value for name, value in scalars.items() if name.startswith(_VAL_LOSS)}
        self.val_loss |= {name.removeprefix(_VAL_LOSS): value for name, value in losses.items()}

    def settle(self) -> None:
        """Wait for the newest step, on all devices of this process, and check that its metrics are finite.

        Raises:
            RunError: they are not, and `stop` is set.
        """
        if self._pending is None or self._pending.scalars:
            return
        values = jax.device_get(jax.block_until_ready(self._pending.metrics))
        now = time.monotonic()
        seconds = max(now - self._ready, 1e-9)
        self._ready = now
        finite, skipped = bool(values.pop("finite")), int(values.pop("skipped"))
        sums = [values.pop(name, ()) for name in ("source_nll", "source_tokens")]
        scalars = {name: float(value) for name, value in sorted(values.items())}
        scalars |= {
            f"train/loss_{name}": float(nll / tokens)
            for name, nll, tokens in zip(self._sources, *sums, strict=True)
            # a step may have no token of a source
            if tokens
        }
        scalars |= self._pending.data
        scalars |= self._work.rates(seconds)
        scalars["train/goodput"] = self._goodput.add(self._pending.step, seconds, now, updated=finite)
        scalars["train/steps_redone"] = self._steps_redone
        if skipped:
            scalars["train/skipped_steps"] = skipped
        self._pending.scalars = scalars
        if not finite:
            self._not_finite(self._pending)

    def picture(self, step: int, name: str, path: str) -> None:
        """Give the PNG at `path` to the sinks, as a picture of `step`."""
        for sink in self._sinks:
            sink.picture(step, name, path)

    def text(self, step: int, name: str, text: str) -> None:
        """Give a text of `step` to the sinks."""
        for sink in self._sinks:
            sink.text(step, name, text)

    @contextlib.contextmanager
    def pause(self, *, compiles: bool = False) -> Iterator[None]:
        """Exclude a time, such as the time of a validation, from the time of the next step.

        Args:
            compiles: it is longer than later ones, because it compiles programs, so the time left does not follow from
                it.
        """
        began = time.monotonic()
        yield
        lasted = time.monotonic() - began
        self._ready += lasted
        if compiles:
            self._progress.exclude(lasted)

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
            f"{what}: not finite. The newest checkpoint is from before this step. Lower optimizer.lr, or skip such "
            f"steps with {set_options('optimizer.nonfinite=skip')}, and run the command again to resume from that "
            "checkpoint"
        )

    def _emit(self, pending: _Pending) -> None:
        for sink in self._sinks:
            sink.write(pending.step, pending.scalars)
        self._progress.update(pending.step, **step_summary(pending.scalars))
