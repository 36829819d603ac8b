"""The plots in the folder of a run: the losses and the balance of the experts."""

import contextlib
import io
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mesh_transformer import files
from mesh_transformer.errors import is_disk_full
from mesh_transformer.logs import log, read_json_lines
from mesh_transformer.runtime.training import expert_load
from mesh_transformer.runtime.training.run_folder import CURVE, EXPERTS_PICTURE, METRICS

_BALANCE_LOSS = "experts/balance_loss"
_DPI = 120


class Plot:
    """A plot that is drawn again and again. An error does not stop the run.

    Args:
        what: names the plot in a warning.
        draw: draws it to a file.
        every_s: least seconds before the first drawing and between two. Drawing also takes at most a twentieth of the time
            of the run.
    """

    def __init__(self, what: str, draw: Callable[[], None], every_s: float):
        self._what, self._draw, self._every_s = what, draw, every_s
        self._next = time.monotonic() + every_s

    def update(self, show: Callable[[], None] | None = None, *, last: bool = False) -> None:
        """Draw it and call `show`, if the last drawing is old enough or if this is the `last` one."""
        began = time.monotonic()
        if began < self._next and not last:
            return
        try:
            self._draw()
            if show is not None:
                show()
        except Exception as error:  # noqa: BLE001  (an error in a plot must not stop the run)
            # the next write to a full disk ends the run with its own message
            if not is_disk_full(error):
                log.warning("the %s plot failed: %s", self._what, error)
        now = time.monotonic()
        self._next = now + max(self._every_s, 20 * (now - began))


def plot_losses(folder: str) -> None:
    """Plot the training and validation losses in `folder`/metrics.jsonl to `folder`/loss.png, and beside them the balance
    loss of routed experts, if the metrics have it."""
    from matplotlib.figure import Figure

    records = _records(folder)
    panels = 2 if _points(records, _BALANCE_LOSS) else 1
    figure = Figure(figsize=(8 * panels, 5), layout="constrained")
    axes, *other = np.atleast_1d(figure.subplots(1, panels))
    names = sorted({name for record in records.values() for name in record if name.startswith("val/loss")})
    _lines(axes, records, ["train/loss", *names])
    axes.set(ylabel="loss (nats per token)", title="Training")
    for balance in other:
        _lines(balance, records, [_BALANCE_LOSS])
        balance.set(ylabel="balance loss, before its weight (1: even)", title="Load of the experts")
    write_png(figure, os.path.join(folder, CURVE))


def plot_experts(folder: str) -> None:
    """Plot the newest load in `folder`/experts.jsonl, of its first validation set, and the largest and the smallest load
    of each step in `folder`/metrics.jsonl to `folder`/experts.png. Without a load, it plots nothing."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    newest = expert_load.newest(folder)
    if newest is None:
        return
    name, load_LE = next(iter(newest.load.items()))
    figure = Figure(figsize=(8, 8), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    scale = TwoSlopeNorm(1, vmin=0, vmax=max(2.0, float(load_LE.max())))
    image = above.imshow(load_LE, cmap="coolwarm", norm=scale, aspect="auto", interpolation="nearest")
    above.set(xlabel="expert", ylabel="layer with experts", title=f"Load of the experts on {name}, step {newest.step}")
    for axis in (above.xaxis, above.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=above, label="tokens / mean of the layer")
    _lines(below, _records(folder), ["experts/largest_load", "experts/smallest_load"])
    below.axhline(1, color="gray", linewidth=0.5)
    below.set(ylabel="tokens / mean of the layer", title="Training")
    write_png(figure, os.path.join(folder, EXPERTS_PICTURE))


def remove_partial(folder: str) -> None:
    """Remove the unfinished pictures that a killed process left in `folder`."""
    for name in (CURVE, EXPERTS_PICTURE):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, f"{name}.tmp"))


def _records(folder: str) -> dict[int, dict[str, Any]]:
    """The metrics of each step. Those of a repeated step replace those of before."""
    return {record["step"]: record for record in read_json_lines(os.path.join(folder, METRICS))}


def _points(records: dict[int, dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(step, record[name]) for step, record in sorted(records.items()) if record.get(name) is not None]


def _lines(axes: Any, records: dict[int, dict[str, Any]], names: list[str]) -> None:
    """One line for each metric that has values, over steps."""
    for name in names:
        if points := _points(records, name):
            marker = "o" if name.startswith("val/") else ""
            axes.plot(*zip(*points, strict=True), label=name, marker=marker, linewidth=1)
    axes.set(xlabel="step")
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend()


def write_png(figure: Any, path: str, dpi: int = _DPI) -> None:
    """Write a PNG, so that the file is always a whole picture. It is drawn in memory, which takes most of the time: a kill
    rarely leaves an unfinished file."""
    png = io.BytesIO()
    figure.savefig(png, dpi=dpi, format="png")
    files.replace(path, png.getvalue())
