"""The group `mesh`: the axes of the device mesh, which named dimensions each of them splits, and whether it divides their sizes."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

from mesh_transformer.errors import UserError
from mesh_transformer.fields import Derived, Devices, Group, Size, Switch, marks

MeshShape = dict[str, int]
"""The size of each axis, in the order of AXES."""
MeshAxes = tuple[str, ...] | None
"""The mesh axes that split a dimension, the outermost first."""
Rules = Mapping[str, MeshAxes]
"""The mesh axes of each named dimension."""


class Axis:
    """Marks a field of MeshConfig as a mesh axis that splits the named dimensions `splits`."""

    def __init__(self, *splits: str):
        self.splits = splits


class MeshConfig(Group):
    """How the devices are laid out."""

    # The axes, slowest first: the devices of a host are divided over the last one first.
    dp: Annotated[Devices | None, Axis("batch"), Derived("devices / the other axes")] = None
    """data-parallel replicas, each with all the weights of its fsdp and tp group"""
    fsdp: Annotated[Devices, Axis("batch", "embed")] = 1
    """data-parallel shards that also split weights and moments (ZeRO-3)"""
    tp: Annotated[Devices, Axis("heads", "mlp", "vocab")] = 1
    """tensor parallelism (Megatron): heads, feed-forward and vocabulary are split"""
    zero1: Switch = False
    """shard the optimizer's moments over dp too, weights replicated (ZeRO-1)"""
    shard_activations: Switch = False
    """between blocks, split the activations' sequence dimension over tp (sequence parallelism)"""
    gather_weights: Literal["per_layer", "per_step"] = "per_layer"
    """when fsdp gathers the weights: layer by layer (least memory) or once a step (classic early_collect)"""
    tpu_size: Devices | None = None
    """cores of the slice that train.py --tpu creates; not used elsewhere"""

    @property
    def given(self) -> MeshShape:
        """The sizes of the axes that have one; an axis without takes the devices that these leave."""
        return {axis: size for axis in AXES if (size := getattr(self, axis)) is not None}

    def shape(self, n_devices: int) -> MeshShape:
        """The mesh for `n_devices` devices.

        Raises:
            UserError: the axes do not multiply to the number of devices.
        """
        given = self.given
        product = math.prod(given.values())
        left, over = divmod(n_devices, product)
        complete = len(given) == len(AXES)
        if over or (complete and left > 1):
            needs = f"= {product} devices" if complete else f"needs a multiple of {product} devices"
            raise UserError(
                f"{' x '.join(f'mesh.{axis} {size}' for axis, size in given.items())} {needs}, found {n_devices}: "
                + _way_out(given, n_devices)
            )
        return {axis: given.get(axis, left) for axis in AXES}


def _way_out(given: MeshShape, n_devices: int) -> str:
    defaults = {axis: MeshConfig.model_fields[axis].default for axis in given}
    changes = [
        f"--set mesh.{axis}={json.dumps(defaults[axis])}" for axis in given if given[axis] != defaults[axis]
    ]
    advice = f"{' '.join(changes)} runs it on what is here ({n_devices})"
    if n_devices == 1:
        advice += "; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight devices"
    return advice


AXES = marks(MeshConfig, Axis)


def mesh_shape(**sizes: int) -> MeshShape:
    """A mesh of these sizes; an axis that is not given has one device."""
    return dict.fromkeys(AXES, 1) | sizes


# Parameters: layers, embed, heads, mlp, vocab. Activations: batch, seq, block_seq (the residual stream's
# sequence between blocks), act_embed; heads, mlp and vocab are shared with the parameters.
DIMENSIONS = ("batch", "seq", "block_seq", "act_embed", "layers", "embed", "heads", "mlp", "vocab")
_RULES = {name: tuple(axis for axis, mark in AXES.items() if name in mark.splits) for name in DIMENSIONS}


def training_rules(mesh: MeshConfig) -> Rules:
    """The table for training: every dimension over the axes that split it."""
    return {**_RULES, "block_seq": (*_RULES["block_seq"], "tp")} if mesh.shard_activations else _RULES


def moment_rules(mesh: MeshConfig) -> Rules:
    """The table for gradients and optimizer state: as the weights, and also over dp under ZeRO-1."""
    # dp last: a device's moments are then a part of its own weights
    return {**_RULES, "embed": (*_RULES["embed"], "dp")} if mesh.zero1 else _RULES


def inference_rules() -> Rules:
    """The table for sampling: weights as in training, every sequence on every data-parallel replica."""
    return {**_RULES, "batch": None}


SWITCHES: dict[str, Callable[[MeshConfig], Rules]] = {
    "shard_activations": training_rules,
    "zero1": moment_rules,
}
"""The fields that split a further dimension, or one over further axes, and the table in which they do."""


def parts(shape: Mapping[str, int], rules: Rules, name: str) -> int:
    """The number of parts that the mesh splits dimension `name` into."""
    return math.prod(shape[axis] for axis in rules[name] or ())


def check_sizes(sizes: Mapping[str, Sequence[Size]], mesh: MeshConfig, shape: MeshShape) -> None:
    """Refuse a size that the axes of its dimension do not divide, in any of the tables of this mesh.

    Raises:
        UserError: names the field, the axes and what would do.
    """
    for switch, rules_of in SWITCHES.items():
        rules, without = rules_of(mesh), rules_of(mesh.model_copy(update={switch: False}))
        for name, given in sizes.items():
            also = f", or set mesh.{switch}=false" if rules[name] != without[name] else ""
            by_what = " x ".join(f"mesh.{axis}" for axis in sorted(rules[name] or (), key=list(shape).index))
            for size in given:
                _check(size, by_what, parts(shape, rules, name), also)


def _check(size: Size, by_what: str, by: int, also: str) -> None:
    whole = math.ceil(size.value / size.multiple) * size.multiple
    if whole % by == 0:
        return
    what, below, above = f"{size.field} {size.value}", whole // by * by, (whole // by + 1) * by
    change = f"it to {below} or {above}" if below else f"it to {above}"
    if size.multiple_field:
        what += f", rounded up to {whole} by {size.multiple_field} {size.multiple},"
        change = f"{size.multiple_field} to {math.lcm(size.multiple, by)}"
    divisor = max(divisor for divisor in _divisors(whole) if divisor < by)
    raise UserError(
        f"{what} is not divisible by {by_what} {by}: set {change}, or {by_what} to {divisor}{also}"
    )


def _divisors(value: int) -> Iterator[int]:
    for small in range(1, math.isqrt(value) + 1):
        if value % small == 0:
            yield from (small, value // small)
