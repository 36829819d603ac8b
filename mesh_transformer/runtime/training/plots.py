"""The plots in the folder of a run: the losses and the balance of the experts."""

import contextlib
import io
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from mesh_transformer import files
from mesh_transformer.errors import is_disk_full
from mesh_transformer.logs import log, read_json_lines
from mesh_transformer.runtime.training import expert_load
from mesh_transformer.runtime.training.run_folder import CURVE, EXPERTS_PICTURE, METRICS

_BALANCE_LOSS = "experts/balance_loss"
# steps and values
Points = list[tuple[int, float]]
_VAL_LOSS = "val/loss_"
_DPI = 120
# width of the map of the experts
_MAP_INCHES = 6.0
# fewer points than this are marked, and are never cut off
_FEW = 20
# the share of the steps, at the start, whose losses may be far above the later ones
_START = 0.1
# they are cut off if they exceed the later losses by this multiple of the later losses' range
_CUT = 1.5


class Plot:
    """A plot that is drawn again and again. An error does not stop the run.

    Args:
        what: names the plot in a warning.
        draw: draws it to a file.
        every_s: least seconds before the first drawing and between two. Drawing also takes at most a twentieth of the
            time of the run.
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
    """Plot the training and validation losses in `folder`/metrics.jsonl to `folder`/loss.png; beside them the balance
    loss of routed experts, and below them the learning rate, if the metrics have them.

    The scale is for the losses after the first steps. If they were far higher before, the legend says how high.
    """
    from matplotlib.figure import Figure

    records = _records(folder)
    balance = _points(records, _BALANCE_LOSS)
    sets = sorted({name for record in records.values() for name in record if name.startswith(_VAL_LOSS)})
    validation = {f"validation: {name.removeprefix(_VAL_LOSS)}": _points(records, name) for name in sets}
    rates = _points(records, "train/learning_rate")
    figure = Figure(figsize=(16 if balance else 8, 6.5 if rates else 5), layout="constrained")
    columns, heights = 2 if balance else 1, (5, 1.5) if rates else (5,)
    (axes, *other), *below = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    _training(axes, _points(records, "train/loss"), validation)
    axes.set(ylabel="loss (nats per token)", title=f"Loss of {_name(folder)}")
    for panel in other:
        _training(panel, balance, {})
        panel.set(ylabel="balance loss, before its weight (1: even)", title="Balance of its experts")
    for panel, *blanks in below:
        _lines(panel, {"": rates})
        panel.set(ylabel="learning rate", ylim=(0, None))
        for blank in blanks:
            blank.set_axis_off()
    write_png(figure, os.path.join(folder, CURVE))


def plot_experts(folder: str) -> None:
    """Plot the newest load in `folder`/experts.jsonl, of its first validation set, and the largest and the smallest
    load of each step in `folder`/metrics.jsonl to `folder`/experts.png. Without a load, it plots nothing."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    newest = expert_load.newest(folder)
    if newest is None:
        return
    name, load_LE = next(iter(newest.load.items()))
    layers, experts = load_LE.shape
    # square cells, unless there are very many or very few of them
    map_inches = min(max(_MAP_INCHES * layers / experts, 1.2, 0.06 * layers), 8.0)
    figure = Figure(figsize=(8, map_inches + 4.0), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(map_inches, 2.5))
    scale = TwoSlopeNorm(1, vmin=0, vmax=max(2.0, float(load_LE.max())))
    image = above.imshow(load_LE, cmap="coolwarm", norm=scale, aspect="auto", interpolation="nearest")
    title = f"Load of the experts of {_name(folder)}\nvalidation on {name} after step {newest.step:,}"
    above.set(xlabel="expert", ylabel="layer with experts", title=title)
    figure.colorbar(image, ax=above, label="load")
    records = _records(folder)
    loads = {f"{which} of all experts": _points(records, f"experts/{which}_load") for which in ("largest", "smallest")}
    _lines(below, loads)
    below.axhline(1, color="gray", linewidth=0.5)
    below.set(ylabel="load (1: the mean of the layer)", title="Load in each training step")
    for axis in (above.xaxis, above.yaxis):
        axis.get_major_locator().set_params(integer=True)
    write_png(figure, os.path.join(folder, EXPERTS_PICTURE))


def remove_partial(folder: str) -> None:
    """Remove the unfinished pictures that a killed process left in `folder`."""
    for name in (CURVE, EXPERTS_PICTURE):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, f"{name}.tmp"))


def _records(folder: str) -> dict[int, dict[str, Any]]:
    """The metrics of each step. A repeated step has the metrics of its last repetition."""
    return {record["step"]: record for record in read_json_lines(os.path.join(folder, METRICS))}


def _points(records: dict[int, dict[str, Any]], name: str) -> Points:
    return [(step, record[name]) for step, record in sorted(records.items()) if record.get(name) is not None]


def _name(folder: str) -> str:
    """The run's name: the last part of its folder."""
    return os.path.basename(os.path.abspath(folder))


def _lines(axes: Any, curves: Mapping[str, Points]) -> None:
    """One line for each curve that has points, over steps."""
    for label, points in curves.items():
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" * (len(points) < _FEW), linewidth=1)
    axes.set(xlabel="step")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.grid(alpha=0.3)
    # one curve without a label needs no legend
    if axes.get_lines() and any(curves):
        axes.legend(loc="best")


def _training(axes: Any, training: Points, others: Mapping[str, Points]) -> None:
    """The curve of the training and `others`, on a scale for the steps after the first ones."""
    shown = _shown_range(training, [point for points in others.values() for point in points])
    _lines(axes, {f"training ({shown[1]})" if shown else "training": training, **others})
    if shown:
        axes.set_ylim(shown[0])


def _shown_range(training: Points, others: Points) -> tuple[tuple[float, float], str] | None:
    """The limits of a scale for the losses after the first steps of the training, and for all `others`, with a text
    about the points above it. None: the scale shows all points."""
    if len(training) < _FEW:
        return None
    first, last = training[0][0], training[-1][0]
    values = [loss for step, loss in training if step > first + _START * (last - first)] + [loss for _, loss in others]
    high = max(values)
    low = min([high, *(loss for _, loss in (*training, *others))])
    margin = max(0.08 * (high - low), 1e-3)
    step, highest = max(training, key=lambda point: point[1])
    if highest - high <= _CUT * (high - low):
        return None
    return (low - margin, high + margin), f"up to {highest:.2f}, in step {step:,}"


def write_png(figure: Any, path: str, dpi: int = _DPI) -> None:
    """Write a PNG, so that the file is always a whole picture. It is drawn in memory, which takes most of the time: a
    kill rarely leaves an unfinished file."""
    png = io.BytesIO()
    figure.savefig(png, dpi=dpi, format="png")
    files.replace(path, png.getvalue())
