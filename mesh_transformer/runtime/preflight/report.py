"""The output of preflight.py: a table, lines of JSON, a picture, and what to change if nothing fits."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mesh_transformer.config import AXES
from mesh_transformer.errors import plural, set_options
from mesh_transformer.estimate.prediction import FORMULA, FORMULA_MEMORY, FORMULA_TIME, Prediction
from mesh_transformer.estimate.programs import COMPILER_FAILED
from mesh_transformer.estimate.target import Target
from mesh_transformer.estimate.timeline import PARTS

_HEAD = (
    "slice",
    "mesh",
    "microbatch x acc.",
    "remat",
    "options",
    "fits",
    "peak GiB",
    "step",
    "range",
    "tokens/s",
    "MFU",
    "days",
    "cost",
)
# the column for what a search has changed and no other column has, and the fields that others have
_OPTIONS = _HEAD.index("options")
_IN_COLUMNS = {
    *(f"mesh.{axis}" for axis in AXES),
    *("compute.remat", "data.batch_size", "data.per_replica_batch", "optimizer.gradient_accumulation_steps"),
}
_MARKS = {"roofline": " (roofline)", FORMULA: " (formula)"}
# parts of the memory and the time, from the table of Okabe and Ito 2008 for all kinds of color vision
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")

# the share of the axis below which a bar gets its length as a text
_INVISIBLE = 0.02


class _Unit(NamedTuple):
    """A unit of memory or time. `size`: in GiB or in seconds."""

    name: str
    size: float


_MEMORY_UNITS = (_Unit("GiB", 1.0), _Unit("MiB", 2.0**-10), _Unit("KiB", 2.0**-20))
_TIME_UNITS = (_Unit("seconds", 1.0), _Unit("milliseconds", 1e-3), _Unit("microseconds", 1e-6))


class Costs(NamedTuple):
    """The cost of a run of `steps` steps. `price`: of a chip for an hour; None: unknown."""

    steps: int
    price: float | None

    def days(self, row: Prediction) -> float | None:
        """Days of the run, without compilation, checkpoints and stops."""
        return None if row.step_s is None or row.program != "train" else self.steps * row.step_s / 86400

    def money(self, row: Prediction, target: Target) -> float | None:
        """The cost of the run, in the unit of the price."""
        days = self.days(row)
        return None if days is None or self.price is None else 24 * days * target.chips * self.price


def verdict(row: Prediction) -> str:
    """A few words for the progress line."""
    if row.fits:
        return f"fits, {row.tokens_per_s:,.0f} tokens/s"
    return "does not compile" if (row.reason or "").startswith(COMPILER_FAILED) else "does not fit"


def print_json(row: Prediction, target: Target, costs: Costs) -> None:
    """One object on one line of standard output."""
    extra = {"days": costs.days(row), "cost": costs.money(row, target)}
    sys.stdout.write(json.dumps({**_rounded(dataclasses.asdict(row)), **_rounded(extra)}) + "\n")
    sys.stdout.flush()


def print_table(predictions: Sequence[Sequence[Prediction]], targets: Sequence[Target], costs: Costs) -> None:
    """A row for each prediction, and the parts of time and memory of the best of each target."""
    pairs = zip(targets, predictions, strict=True)
    lines = [_HEAD, *(_line(row, target, costs) for target, rows in pairs for row in rows)]
    if not any(line[_OPTIONS] for line in lines[1:]):
        lines = [line[:_OPTIONS] + line[_OPTIONS + 1 :] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    out = sys.stdout.write
    for line in lines:
        out("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")
    for row in (row for rows in predictions for row in rows):
        if row.reason:
            out(f"\n{row.slice} {mesh_text(row.mesh)}: {row.reason}\n")
        elif row.best or row.program != "train":
            gib, seconds = _unit(_MEMORY_UNITS, [row.memory_gib]), _unit(_TIME_UNITS, [row.parts])
            out(f"\n{row.slice} {row.program}, {gib.name} of a device: {_parts(row.memory_gib, gib, 2)}\n")
            out(f"{row.slice} {row.program}, predicted {seconds.name}: {_parts(row.parts, seconds, 3)}\n")
        if row.best and row.set:
            out(f"{row.slice}, to use it: {set_options(*row.set)}\n")
        if row.op_table:
            out(f"{row.slice} {row.program}, operations: {row.op_table}\n")
        for note in row.notes:
            out(f"{row.slice} {row.program}, {mesh_text(row.mesh)}: {note}\n")
    formula = [row.estimate == FORMULA for rows in predictions for row in rows]
    if any(formula):
        note = only_formula(sorted({missing for target in targets if (missing := target.missing_compiler)}))
        out(f"\n{note[0].upper()}{note[1:]} (docs/preflight.md).\n")
    if not all(formula):
        out("\nMemory is the compiler's own count. Times are predictions (docs/preflight.md).\n")
    sys.stdout.flush()


def only_formula(missing: Sequence[str]) -> str:
    """A sentence about predictions without the compilers `missing`."""
    return (
        f"formula only, without {' and '.join(missing)}: nothing is compiled; memory is exact to about "
        f"{FORMULA_MEMORY:.0%}, times to {FORMULA_TIME:.0%} of what the compiler gives"
    )


def advice(target: Target, rows: Sequence[Prediction], remedies: Sequence[str]) -> str:
    """For a target that nothing fits: the prediction that needs the least memory, and the changes that would fit."""
    known = [row for row in rows if row.peak_gib is not None]
    text = f"{target.name}: nothing fits"
    if known:
        nearest = min(known, key=lambda row: row.peak_gib or 0.0)
        text += f"; the nearest, {mesh_text(nearest.mesh)}, needs {nearest.peak_gib:.2f} of {nearest.usable_gib} GiB"
    else:
        text += f"; {rows[0].reason}"
    return text + (f". It would fit with {', or '.join(remedies)}" if remedies else "")


def plot(predictions: Sequence[Sequence[Prediction]], path: str, title: str) -> None:
    """Write a picture of memory and time by part to `path`."""
    from matplotlib.figure import Figure

    rows = [row for rows in predictions for row in rows][::-1]
    figure = Figure(figsize=(12, 2.4 + 0.65 * len(rows)), layout="constrained")
    figure.suptitle(title)
    memory, time = figure.subplots(1, 2)
    labels = [
        f"{row.slice} {row.program}{' *' * row.best}\n"
        f"{', '.join(filter(None, (mesh_text(row.mesh), row.remat, _options(row))))}\n"
        f"{plural(row.accumulation, 'microbatch', 'microbatches')} of {row.microbatch}"
        for row in rows
    ]
    names = list(dict.fromkeys(name for row in rows for name in row.memory_gib))
    unit = _unit(_MEMORY_UNITS, [{"usable": row.usable_gib} for row in rows])
    held = [row.memory_gib for row in rows]
    longest = max(row.usable_gib for row in rows)
    source = "by formula" if any(row.estimate == FORMULA for row in rows) else "exact"
    _bars(memory, f"Memory, {source}", held, names, unit, longest)
    memory.set_xlabel(f"{unit.name} of a device (black line: usable)")
    memory.set_yticks(range(len(labels)), labels)
    for place, row in enumerate(rows):
        memory.plot([row.usable_gib / unit.size] * 2, [place - 0.45, place + 0.45], color="black")
        if row.reason:
            memory.text(0, place, " does not fit", va="center")
        elif (total := sum(row.memory_gib.values())) < _INVISIBLE * longest:
            bar_unit = _unit(_MEMORY_UNITS, [row.memory_gib])
            memory.text(total / unit.size, place, f" {total / bar_unit.size:.1f} {bar_unit.name}", va="center")
    unit = _unit(_TIME_UNITS, [row.parts for row in rows])
    _bars(time, "Time, predicted", [row.parts for row in rows], PARTS, unit, 0.0)
    time.set(xlabel=f"{unit.name} of a step or a call", yticks=range(len(labels)), yticklabels=[])
    figure.savefig(path, dpi=120, format="png")


def _bars(
    axes: Any,
    title: str,
    values: Sequence[Mapping[str, float]],
    names: Sequence[str],
    unit: _Unit,
    least: float,
) -> None:
    """A bar for each row. The axis reaches beyond the longest one, and beyond `least`."""
    left = [0.0] * len(values)
    for name, color in zip(names, _COLORS, strict=False):
        widths = [row.get(name, 0.0) / unit.size for row in values]
        axes.barh(range(len(values)), widths, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlim=(0, 1.05 * max(*left, least / unit.size) or 1), ylim=(-0.6, len(values) - 0.4))
    axes.xaxis.get_major_locator().set_params(nbins=7)
    # the title is above the rows of the legend
    axes.set_title(title, pad=10 + 16 * -(-len(names) // 4))
    if names:
        axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1), borderaxespad=0.3, ncols=4)


def _line(row: Prediction, target: Target, costs: Costs) -> tuple[str, ...]:
    days, money = costs.days(row), costs.money(row, target)
    peak = "?" if row.peak_gib is None else f"{row.peak_gib:.2f}"
    name = row.slice if row.program == "train" else f"{row.slice} {row.program}"
    batch = f"{row.microbatch} x {row.accumulation}"
    shape = (f"{name}{' *' * row.best}", mesh_text(row.mesh), batch, row.remat, _options(row))
    memory = ("yes" if row.fits else "no", f"{peak} of {row.usable_gib}")
    if row.step_s is None or row.step_s_range is None:
        return (*shape, *memory, *[""] * 6)
    low, high = map(_seconds, row.step_s_range)
    speed = (
        f"{_seconds(row.step_s)}{_MARKS.get(row.estimate, '')}",
        f"{low} to {high}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.mfu:.1%}",
    )
    return (*shape, *memory, *speed, "" if days is None else f"{days:.3g}", "" if money is None else f"{money:,.0f}")


def mesh_text(mesh: Mapping[str, int]) -> str:
    """The axes of several devices, such as `fsdp 4 tp 2`."""
    return " ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one device" * bool(mesh) or "-"


def _options(row: Prediction) -> str:
    """What a search has changed beside the fields of columns, such as `shard_activations`."""
    pairs = (argument.partition("=")[::2] for argument in row.set)
    others = ((name.rpartition(".")[2], value) for name, value in pairs if name not in _IN_COLUMNS)
    return ", ".join(name if value == "true" else f"{name} {value}" for name, value in others)


def _seconds(value: float) -> str:
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _unit(units: Sequence[_Unit], rows: Sequence[Mapping[str, float]]) -> _Unit:
    """The unit in which the largest sum of a row is 1 or more. Without a sum, it is the first one."""
    largest = max((sum(row.values()) for row in rows), default=0.0)
    return next((unit for unit in units if largest >= unit.size), units[-1]) if largest else units[0]


def _parts(parts: Mapping[str, float], unit: _Unit, digits: int) -> str:
    """The parameters and all parts that are not rounded to 0, with `digits` digits behind the point."""
    shown = {name: f"{value / unit.size:.{digits}f}" for name, value in parts.items()}
    return ", ".join(f"{name} {text}" for name, text in shown.items() if text.strip("0.") or name == "parameters")


def _rounded(value: Any) -> Any:
    """Six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value
