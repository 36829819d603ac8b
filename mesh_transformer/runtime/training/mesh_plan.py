"""device_train.py --plan-mesh: the parts of each host and device, as a table and as a picture. Nothing is compiled."""

import colorsys
import dataclasses
import functools
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax

from mesh_transformer import logs, platforms
from mesh_transformer.config import Config, MeshShape
from mesh_transformer.config.mesh import named
from mesh_transformer.errors import plural
from mesh_transformer.estimate.tpus import slice_devices
from mesh_transformer.logs import log
from mesh_transformer.models.placement import Placement
from mesh_transformer.parallel.holdings import Holding, Spans, bytes_per_device, holdings, merged, spans
from mesh_transformer.runtime.training import run_folder
from mesh_transformer.runtime.training.config import training_config
from mesh_transformer.runtime.training.plots import write_png
from mesh_transformer.spec import starts
from mesh_transformer.train.step import TrainProgram

PICTURE = "mesh.png"
# The title of each dimension's column, and the unit that it counts. Other dimensions have their name as both.
_COLUMNS = {
    "layers": ("layers", "layers"),
    "computed": ("computed", "layers that it computes, with weights from the devices that keep them"),
    "batch": ("rows", "sequences of a microbatch"),
    "seq": ("positions", "positions of a sequence"),
    "block_seq": ("between blocks", "positions of the activations between blocks"),
    "heads": ("heads", "heads of attention"),
    "kv_heads": ("key heads", "heads of keys and values"),
    "mlp": ("ff", "columns of the feed-forward"),
    "experts": ("experts", "experts of a layer"),
    "vocab": ("vocab", "rows of the vocabulary"),
    "embed": ("weights", "columns of the weights, of the model's width"),
    "moments": ("state", "columns of the optimizer state, of the model's width"),
}
# A column that would repeat another one is left out.
_SAME = {"block_seq": "seq", "kv_heads": "heads", "moments": "embed"}
# More devices than this get a line for each host, and no text in the picture.
MANY = 64
# Between the hosts of the picture, in units of a device.
_GAP = 0.3


@dataclasses.dataclass(frozen=True, eq=False)
class MeshPlan:
    """The parts of arrays that each device of a training run holds.

    Args:
        shape: the size of each mesh axis.
        sizes: the size of each named dimension, for one microbatch.
        held: the parts of each device, of split and of replicated dimensions.
        parameter_bytes, frozen_bytes, state_bytes: float32 parameters that are trained, frozen ones and optimizer state
            of one device, which are equal for all.
        slices: the TPU slice of each device, by its id.
    """

    shape: MeshShape
    sizes: dict[str, int]
    held: list[Holding]
    parameter_bytes: int
    frozen_bytes: int
    state_bytes: int
    slices: dict[int, int]

    @classmethod
    def of(cls, config: Config, devices: Sequence[jax.Device]) -> Self:
        """The plan of a config on these devices, which need not be attached.

        Raises:
            UserError: the devices do not fit the mesh, or an axis does not divide a size.
        """
        shape = config.check_devices(len(devices))
        batch = config.microbatch(shape)
        program = TrainProgram(Placement.of(config, devices), config)
        sizes = {name: given[0].whole for name, given in config.sizes.items() if given}
        decoder = program.model.decoder
        pipelined = decoder.pipelined_group(config.mesh.virtual_stages(shape)) or 0
        sizes |= {"batch": batch, "kv_heads": decoder.kv_heads, "layers": decoder.layer_groups[pipelined].layers}
        held = holdings(program.partition, sizes)
        sizes["moments"] = sizes["embed"]
        for holding, state in zip(held, holdings(program.moments, {"embed": sizes["embed"]}), strict=True):
            holding.parts["moments"] = state.parts["embed"]
        if shape["pp"] > 1 and (rounds := config.mesh.rounds_of_layers) > 1:
            sizes["computed"] = sizes["layers"]
            for holding in held:
                holding.parts["computed"] = _computed(holding.parts["layers"], sizes["layers"], rounds)
        if len(decoder.layer_groups) > 1:
            _count_whole(sizes, held, starts(decoder.layer_groups)[pipelined], len(decoder.layers))
        state = program.abstract_state
        slices = {device.id: number for number, members in enumerate(platforms.by_slice(devices)) for device in members}
        parameters, frozen = bytes_per_device(state.params), bytes_per_device(state.frozen)
        return cls(shape, sizes, held, parameters, frozen, bytes_per_device(state.opt_state), slices)

    @functools.cached_property
    def hosts(self) -> dict[int, list[Holding]]:
        """The devices of each process."""
        by_host: dict[int, list[Holding]] = defaultdict(list)
        for holding in sorted(self.held, key=lambda holding: (holding.device.process_index, holding.device.id)):
            by_host[holding.device.process_index].append(holding)
        return dict(by_host)

    @functools.cached_property
    def axes(self) -> list[str]:
        """The axes with more than one device, outermost first."""
        return [axis for axis, size in self.shape.items() if size > 1]

    @functools.cached_property
    def split(self) -> dict[str, tuple[str, str]]:
        """One column for each dimension that devices split."""
        columns = {name: _COLUMNS.get(name, (name, name)) for name in (*_COLUMNS, *self.sizes) if name in self.sizes}
        return {name: column for name, column in columns.items() if self._is_split(name) and not self._repeats(name)}

    def _is_split(self, name: str) -> bool:
        return len(set(self._groups(name))) > 1

    def _repeats(self, name: str) -> bool:
        other = _SAME.get(name)
        return other is not None and self._groups(name) == self._groups(other)

    def _groups(self, name: str) -> list[int]:
        """For each device, the first device that holds its part, as an index of `held`."""
        first: dict[Spans, int] = {}
        return [first.setdefault(holding.parts[name], index) for index, holding in enumerate(self.held)]

    @functools.cached_property
    def several_slices(self) -> bool:
        """Whether the devices belong to several TPU slices."""
        return len(set(self.slices.values())) > 1

    def crosses_hosts(self, axis: str) -> bool:
        """Whether devices that differ in this axis only belong to different processes."""
        return self._crosses(axis, lambda device: device.process_index)

    def crosses_slices(self, axis: str) -> bool:
        """Whether devices that differ in this axis only belong to different slices."""
        return self._crosses(axis, lambda device: self.slices[device.id])

    def _crosses(self, axis: str, part: Callable[[jax.Device], int]) -> bool:
        groups = defaultdict(set)
        for holding in self.held:
            place = tuple((name, at) for name, at in holding.place.items() if name != axis)
            groups[place].add(part(holding.device))
        return any(len(group) > 1 for group in groups.values())


def _computed(kept: Spans, layers: int, rounds: int) -> Spans:
    """The layers that a stage computes: in each round, the layers of one virtual stage.

    Args:
        kept: the layers whose parameters it keeps.
    """
    rounds_start = range(0, layers, layers // rounds)
    return merged(
        range(first + span.start // rounds, first + span.stop // rounds) for first in rounds_start for span in kept
    )


def _count_whole(sizes: dict[str, int], held: list[Holding], first: int, layers: int) -> None:
    """Number the layers from the start of the model. Before, the pipelined group, whose first layer is `first` in the
    model, had the number 0. Every device has the layers before and after this group."""
    stop = first + sizes["layers"]
    for holding in held:
        for name in holding.parts.keys() & {"layers", "computed"}:
            moved = (range(span.start + first, span.stop + first) for span in holding.parts[name])
            holding.parts[name] = merged([span for span in (range(first), *moved, range(stop, layers)) if span])
    for name in sizes.keys() & {"layers", "computed"}:
        sizes[name] = layers


def run(
    config_path: str,
    overrides: Sequence[str],
    tune_model_path: str | None,
    slice_name: str = "",
    adapter: str | None = None,
) -> int:
    """Run device_train.py --plan-mesh. Returns 0.

    Args:
        slice_name: a TPU slice that need not be attached; empty: the devices of this job.

    Raises:
        UserError: the config or the devices cannot be used, or model_dir is not writable.
    """
    logs.set_up()
    if slice_name:
        # the devices of this machine stay free
        jax.config.update("jax_platforms", "cpu")
    config = training_config(config_path, overrides, tune_model_path, adapter)
    if not slice_name:
        platforms.start_devices()
    plan = MeshPlan.of(config, slice_devices(slice_name) if slice_name else jax.devices())
    if slice_name or jax.process_index() == 0:
        folder = config.checkpoint.model_dir
        run_folder.check_writable(folder)
        sys.stdout.write("\n".join(lines(plan)) + "\n")
        sys.stdout.flush()
        path = os.path.join(folder, PICTURE)
        draw(plan, path)
        log.info("picture of the mesh written to %s", path)
    return 0


def lines(plan: MeshPlan) -> list[str]:
    """The table: a line for each device, or for each host of many devices."""
    kind = plan.held[0].device.device_kind
    across = [axis for axis in plan.axes if plan.crosses_hosts(axis)]
    inside = [axis for axis in plan.axes if axis not in across]
    frozen = f"{_size(plan.frozen_bytes)} of frozen parameters, " if plan.frozen_bytes else ""
    slices, between = "", ""
    if plan.several_slices:
        slices = f", {len(set(plan.slices.values()))} slices"
        between = f"; across slices: {', '.join(filter(plan.crosses_slices, plan.axes))}"
    header = [
        f"{named(plan.shape)}: {len(plan.held)} x {kind}{slices}, {plural(len(plan.hosts), 'host')}",
        f"Axes inside a host: {', '.join(inside) or 'none'}; across hosts: {', '.join(across) or 'none'}{between}.",
        f"Each device: {_size(plan.parameter_bytes)} of parameters (float32), {frozen}{_size(plan.state_bytes)} of "
        "optimizer state.",
        *_explained(plan),
        *(["A line is a host: it says what its devices hold together."] if len(plan.held) > MANY else []),
        "",
    ]
    places = ["slice", "host"] if plan.several_slices else ["host"]
    rows = [[*places, "devices", *plan.axes, *(title for title, _ in plan.split.values())]]
    for host, devices in plan.hosts.items():
        groups = [devices] if len(plan.held) > MANY else [[holding] for holding in devices]
        for group in groups:
            where = [str(plan.slices[group[0].device.id]), str(host)][-len(places) :]
            rows.append([*where, *_row(plan, group)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return header + [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _explained(plan: MeshPlan) -> list[str]:
    """The meaning of the columns, and the dimensions that are not split."""
    columns = [f"{title}: {text} ({plan.sizes[name]:,})" for name, (title, text) in plan.split.items()]
    unsplit = [
        f"{plan.sizes[name]:,} {_COLUMNS[name][1]}"
        for name in ("layers", "batch", "seq", "heads")
        if name not in plan.split
    ]
    return [*columns, *([f"Each device holds all of: {', '.join(unsplit)}."] if unsplit else [])]


def _row(plan: MeshPlan, group: Sequence[Holding]) -> list[str]:
    """The cells of a line for a group of devices: the union of their parts."""
    return [
        _text(spans(holding.device.id for holding in group)),
        *(_text(spans(holding.place[axis] for holding in group)) for axis in plan.axes),
        *(_text(_union(holding.parts[name] for holding in group)) for name in plan.split),
    ]


def _union(parts: Iterable[Spans]) -> Spans:
    return merged(span for part in set(parts) for span in part)


def _text(numbers: Spans) -> str:
    """The spans as text, such as `0-15, 48-63`: both ends belong to a span."""
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in numbers)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def draw(plan: MeshPlan, path: str) -> None:
    """Write a picture of the hosts and their devices to `path`, as PNG."""
    from matplotlib.figure import Figure

    hosts, many = plan.hosts, len(plan.held) > MANY
    in_host = max(map(len, hosts.values()))
    wide, high = min(in_host, 4), -(-in_host // 4)
    per_row = math.ceil((len(hosts) / 2) ** 0.5)
    # units of the picture: a device is 1 x 1, with a gap beside and above each host
    width, height = (wide + _GAP) * per_row - _GAP, (high + _GAP) * -(-len(hosts) // per_row)
    inches = (0.5, 0.35) if many else (1.7, 0.2 + 0.13 * (1 + len(plan.split)))
    figure = Figure(figsize=(max(inches[0] * width + 0.3, 5), inches[1] * height + 0.7), layout="constrained")
    axes = figure.subplots()
    for number, (host, devices) in enumerate(hosts.items()):
        left, top = number % per_row * (wide + _GAP), number // per_row * (high + _GAP) + _GAP
        where = f"slice {plan.slices[devices[0].device.id]}, host {host}" if plan.several_slices else f"host {host}"
        axes.text(left, top - 0.05, where, fontsize=6 if many else 8)
        for index, holding in enumerate(devices):
            _draw_device(axes, plan, holding, (left + index % wide, top + index // wide), brief=many)
    axes.set(xlim=(-0.02, width + 0.02), ylim=(height + 0.02, 0))
    axes.axis("off")
    axes.set_title(f"{named(plan.shape)}\n{_legend(plan.axes, many)}", fontsize=9)
    write_png(figure, path, dpi=110)


def _legend(axes: Sequence[str], numbers: bool) -> str:
    """The legend of the colors: devices that differ in the innermost axis only are shades of one color."""
    outer, inner = (axes[:-1], axes[-1:]) if len(axes) > 1 else (axes, ())
    parts = [f"{what}: {', '.join(names)}" for what, names in (("color", outer), ("shade", inner)) if names]
    return "; ".join([*parts, *([f"numbers: {', '.join(axes)}"] if numbers else [])])


def _draw_device(axes: Any, plan: MeshPlan, holding: Holding, at: tuple[float, float], *, brief: bool) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(at, 0.96, 0.96, facecolor=_color(plan, holding.place), edgecolor="black", linewidth=0.5))
    place = " ".join(f"{axis} {holding.place[axis]}" for axis in plan.axes)
    held = [f"{title} {_text(holding.parts[name])}" for name, (title, _) in plan.split.items()]
    text = "\n".join([f"device {holding.device.id}{place and f': {place}'}", *held])
    if brief:
        text = ", ".join(str(holding.place[axis]) for axis in plan.axes)
    axes.text(at[0] + 0.04, at[1] + 0.06, text, fontsize=5 if brief else 7, va="top", clip_on=True)


def _color(plan: MeshPlan, place: Mapping[str, int]) -> tuple[float, float, float]:
    """The outer axes give the hue, and the innermost axis the lightness. So the devices of a group of tensor
    parallelism are shades of one color."""
    outer, inner = (plan.axes[:-1], plan.axes[-1]) if len(plan.axes) > 1 else (plan.axes, None)
    hue, groups = 0, 1
    for axis in outer:
        hue, groups = hue * plan.shape[axis] + place[axis], groups * plan.shape[axis]
    shade = place[inner] / max(plan.shape[inner] - 1, 1) if inner else 0.0
    return colorsys.hls_to_rgb(hue / groups, 0.9 - 0.25 * shade, 0.7)
