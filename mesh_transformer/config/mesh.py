"""The group `mesh`: the axes of the device mesh, the named dimensions that each axis splits, and the checks that it
divides their sizes."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError, listed, set_options
from mesh_transformer.fields import STACKS, ConfigGroup, Count, Derived, Devices, Size, Switch, Unit, marks
from mesh_transformer.spec import Decoder

MeshShape = dict[str, int]
"""The size of each mesh axis, in the order of AXES."""
MeshAxes = tuple[str, ...] | None
"""The mesh axes that split a dimension, outermost first."""
Rules = Mapping[str, MeshAxes]
"""The mesh axes of each named dimension."""


class Axis:
    """Marks a field of MeshConfig as a mesh axis that splits the named dimensions `splits`."""

    def __init__(self, *splits: str):
        self.splits = splits


class MeshConfig(ConfigGroup):
    """The device mesh."""

    # The axes, outermost first. The devices of a host are assigned to the last axis first.
    pp: Annotated[Devices, Axis("layers")] = 1
    """pipeline parallelism: splits the layers into stages; the microbatches of a step go from stage to stage"""
    dp: Annotated[Devices | None, Axis("batch"), Derived("devices / the other axes")] = None
    """data-parallel replicas; the devices of each replica together hold all weights"""
    fsdp: Annotated[Devices, Axis("batch", "embed")] = 1
    """data-parallel shards that also split the weights and the optimizer state (FSDP, ZeRO-3)"""
    ep: Annotated[Devices, Axis("batch", "experts")] = 1
    """expert parallelism: data-parallel shards that also split the experts; all other weights stay replicated"""
    cp: Annotated[Devices, Axis("seq", "block_seq")] = 1
    """context parallelism: splits the positions of each sequence; the weights stay replicated"""
    tp: Annotated[Devices, Axis("heads", "kv_heads", "mlp", "vocab")] = 1
    """tensor parallelism (Megatron): splits heads, feed-forward and vocabulary"""
    context_mode: Literal["zigzag", "ring", "ulysses", "gather"] = "zigzag"
    """how attention reads the positions of other devices of cp. zigzag: keys and values go around a ring, and each
    device has an early and a late part of the sequence, so that all have equal work. ring: keys and values go around a
    ring, and each device has consecutive positions. ulysses: the heads are split instead of the positions. gather: each
    device gathers all keys and values"""
    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """the order of the microbatches in the stages of pp. 1f1b: each stage has consecutive layers. interleaved: each
    stage has the layers of mesh.rounds virtual stages, so that it waits less and sends more"""
    rounds: Annotated[Count, Unit("virtual stages")] = 2
    """virtual stages (each has consecutive layers) on each stage of pp, with mesh.schedule interleaved"""
    zero1: Switch = False
    """also shard the optimizer state over dp; the weights stay replicated (ZeRO-1)"""
    shard_activations: Switch = False
    """split the sequence dimension of the activations between blocks over tp (sequence parallelism)"""
    overlap_tp: Literal["auto"] | Switch = "auto"
    """send the activations that shard_activations splits in parts around a ring, while other parts are multiplied. true
    implies shard_activations; auto: a training step with shard_activations on a TPU takes what the closed form of
    preflight estimates faster; all else takes false"""
    gather_weights: Literal["per_layer", "per_step"] = "per_layer"
    """when fsdp gathers the weights: per layer (least memory) or per step (classic early_collect)"""
    dcn: Literal["dp", "pp"] | None = None
    """the axis that crosses TPU slices, between which the network is slow. Several slices need it; one slice ignores
    it"""
    sum_gradients: Annotated[
        Literal["per_microbatch", "per_step"], Derived("per_step with dcn dp and without zero1, else per_microbatch")
    ] = "per_microbatch"
    """when the replicas of dp sum their gradients: per microbatch, each layer as soon as its gradient is known, or once
    a step, in float32. zero1 needs per_microbatch"""
    tpu_size: Devices | None = None
    """cores of the slice that `mesh-transformer drive --tpu` creates; ignored elsewhere"""

    @classmethod
    def derive(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Split the activations if their communication is to overlap. Sum gradients once a step if they cross
        slices."""
        if values.get("overlap_tp") is True:
            values = {"shard_activations": True, **values}
        if values.get("dcn") == "dp" and values.get("zero1") is not True:
            values = {"sum_gradients": "per_step", **values}
        return values

    @model_validator(mode="after")
    def check_multiple(self) -> Self:
        if self.overlap_tp is True and not self.shard_activations:
            raise UserError(
                "mesh.overlap_tp true needs mesh.shard_activations true: remove mesh.shard_activations, or set "
                "mesh.overlap_tp=false"
            )
        if self.sum_gradients == "per_step" and self.zero1:
            raise UserError(
                "mesh.sum_gradients per_step needs whole sums of gradients on each replica, and mesh.zero1 splits "
                "them: set mesh.zero1=false, or mesh.sum_gradients=per_microbatch"
            )
        return self

    @property
    def rounds_of_layers(self) -> int:
        """The virtual stages on each stage of pp."""
        return self.rounds if self.schedule == "interleaved" else 1

    def virtual_stages(self, shape: MeshShape) -> int:
        """Pipeline stages x rounds; one group of layers is split over them. 1 without a pipeline."""
        return shape["pp"] * self.rounds_of_layers if shape["pp"] > 1 else 1

    @property
    def given(self) -> MeshShape:
        """The sizes of the axes that are set. An axis that is not set takes the remaining devices."""
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
                f"{' x '.join(f'mesh.{axis} {given[axis]}' for axis in _changed(given))} {needs}, found {n_devices}: "
                + _advice(given, n_devices)
            )
        return {axis: given.get(axis, left) for axis in AXES}


def _advice(given: MeshShape, n_devices: int) -> str:
    changes = (f"mesh.{axis}={json.dumps(default)}" for axis, default in _changed(given).items())
    advice = f"pass {set_options(*changes)} to use the devices found"
    if n_devices == 1:
        advice += ", or, on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count=8 to create eight devices"
    return advice


def _changed(given: MeshShape) -> dict[str, int | None]:
    """The axes whose sizes differ from their defaults, and these defaults."""
    defaults = {axis: MeshConfig.model_fields[axis].default for axis in given}
    return {axis: default for axis, default in defaults.items() if given[axis] != default}


AXES = marks(MeshConfig, Axis)


def mesh_shape(**sizes: int) -> MeshShape:
    """A mesh shape with these sizes; an axis that is not given has size 1.

    Raises:
        UserError: an axis is unknown.
    """
    if unknown := sizes.keys() - AXES.keys():
        raise UserError(f"unknown mesh axis {listed(sorted(unknown))}: the axes are {', '.join(AXES)}")
    return dict.fromkeys(AXES, 1) | sizes


def named(shape: MeshShape) -> str:
    """The axes with more than one device, such as `dp 2 x tp 4`."""
    return " x ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1) or "one device"


# Parameters: layers, whole_layers (a stack that every stage of a pipeline computes), embed, heads, kv_heads, mlp,
# vocab, experts. Activations: batch, seq, block_seq (the residual stream's sequence between blocks), act_embed; heads,
# mlp and vocab are shared with the parameters.
DIMENSIONS = (
    "batch",
    "seq",
    "block_seq",
    "act_embed",
    *STACKS,
    "embed",
    "heads",
    "kv_heads",
    "mlp",
    "vocab",
    "experts",
)
# of a size, in a message
_LISTED_DIVISORS = 8
_RULES = {name: tuple(axis for axis, mark in AXES.items() if name in mark.splits) for name in DIMENSIONS}


def training_rules(mesh: MeshConfig) -> Rules:
    """The rules for training: each dimension is split over its axes."""
    return {**_RULES, "block_seq": (*_RULES["block_seq"], "tp")} if mesh.shard_activations else _RULES


def dimension_rules(*, shard_activations: bool = False, **overrides: MeshAxes) -> Rules:
    """`training_rules` without a config.

    Args:
        shard_activations: as `mesh.shard_activations`.
        overrides: the mesh axes of named dimensions, in place of the rules of training. None: the dimension is
            replicated.
    """
    return {**training_rules(MeshConfig(shard_activations=shard_activations)), **overrides}


def moment_rules(mesh: MeshConfig) -> Rules:
    """The rules for gradients and optimizer state: as for the weights, and also over dp with ZeRO-1."""
    # dp is last, so that a device updates a part of the weights that it holds
    return {**_RULES, "embed": (*_RULES["embed"], "dp")} if mesh.zero1 else _RULES


def whole_sequence_rules(shape: MeshShape, sizes: Mapping[str, Sequence[Size]]) -> Rules:
    """The rules for programs that split neither the positions of a sequence nor the layers: sampling, serving and
    scoring.

    The axes pp and cp are folded into tp if together they divide the sizes that tp splits, else into the split of the
    weights by fsdp, else their devices hold replicas.

    Args:
        sizes: of the dimensions of the model.
    """
    free = tuple(axis for axis in ("pp", "cp") if shape[axis] > 1)
    if not free:
        # the shardings of parameters are then the shardings of training
        return _RULES
    rules = {name: _without(_without(axes, "cp"), "pp") for name, axes in _RULES.items()}
    for axis, folded in ("tp", (*free, "tp")), ("fsdp", ("fsdp", *free)):
        split = {
            name: _replaced(axes, axis, folded) for name, axes in rules.items() if axis in axes and name != "batch"
        }
        by = {name: math.prod(shape[axis] for axis in axes) for name, axes in split.items()}
        if all(size.whole % by[name] == 0 for name in split for size in sizes.get(name, ())):
            return {**rules, **split}
    return rules


def _without(axes: tuple[str, ...], axis: str) -> tuple[str, ...]:
    return _replaced(axes, axis, ())


def _replaced(axes: tuple[str, ...], axis: str, others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(new for old in axes for new in (others if old == axis else (old,)))


SWITCHES: dict[str, Callable[[MeshConfig], Rules]] = {
    "shard_activations": training_rules,
    "zero1": moment_rules,
}
"""The fields that split one more dimension, or split a dimension over one more axis, with the rules that they
change."""


def parts(shape: Mapping[str, int], rules: Rules, name: str) -> int:
    """The number of parts into which the mesh splits dimension `name`."""
    return math.prod(shape[axis] for axis in rules[name] or ())


def check_sizes(sizes: Mapping[str, Sequence[Size]], mesh: MeshConfig, shape: MeshShape) -> None:
    """Refuse a size that the axes of its dimension do not divide, under any rules of this mesh.

    Raises:
        UserError: names the field, the axes and sizes that are divisible.
    """
    for switch, rules_of in SWITCHES.items():
        rules, without = rules_of(mesh), rules_of(mesh.model_copy(update={switch: False}))
        for name, given in sizes.items():
            also = f", or set mesh.{switch}=false" if rules[name] != without[name] else ""
            if also and switch == "shard_activations" and mesh.overlap_tp is True:
                also += " and mesh.overlap_tp=false"
            axes = [axis for axis in shape if axis in (rules[name] or ()) and shape[axis] > 1]
            by_what = " x ".join(f"mesh.{axis}" for axis in axes)
            for size in given:
                check_multiple(size, by_what, parts(shape, rules, name), also)


def part_of_a_slice(mesh: MeshConfig, shape: MeshShape, slices: int) -> MeshShape:
    """The part of a mesh that each of several slices has: a share of the axis `mesh.dcn`.

    Raises:
        UserError: `mesh.dcn` is not set, or the slices do not divide its axis; says what to set.
    """
    if mesh.dcn is None:
        raise UserError(
            f"the devices belong to {slices} slices, and the network between slices is slow: set mesh.dcn to the axis "
            "that crosses it: mesh.dcn=dp, or mesh.dcn=pp if the weights do not fit one slice"
        )
    size, other = shape[mesh.dcn], {"dp": "pp", "pp": "dp"}[mesh.dcn]
    if size % slices:
        also = f" and mesh.{other} to a multiple of {slices}" if shape[other] % slices else ""
        raise UserError(
            f"mesh.{mesh.dcn} {size} is not divisible by the {slices} slices that mesh.dcn {mesh.dcn} splits it over: "
            f"set mesh.{mesh.dcn} to a multiple of {slices}, or set mesh.dcn={other}{also}"
        )
    return {**shape, mesh.dcn: size // slices}


def check_overlap(mesh: MeshConfig, shape: MeshShape) -> None:
    """Refuse `mesh.overlap_tp` without tensor parallelism.

    Raises:
        UserError: says what to set.
    """
    if mesh.overlap_tp is True and shape["tp"] == 1:
        raise UserError(
            "mesh.overlap_tp true needs mesh.tp over 1, and mesh.tp is 1: set mesh.tp, or mesh.overlap_tp=auto and "
            "mesh.shard_activations=false"
        )


def check_context(sizes: Mapping[str, Sequence[Size]], mesh: MeshConfig, shape: MeshShape) -> None:
    """Refuse a size that `mesh.context_mode` cannot split.

    Raises:
        UserError: names the field, the axes, sizes that are divisible, and a mode without this condition.
    """
    cp = shape["cp"]
    if cp == 1:
        return
    if mesh.context_mode == "zigzag":
        for size in sizes["seq"]:
            check_multiple(size, "mesh.cp", cp, ", or set mesh.context_mode=ring", times=2)
    if mesh.context_mode == "ulysses":
        for size in sizes["heads"]:
            check_multiple(size, "mesh.cp x mesh.tp", cp * shape["tp"], ", or set mesh.context_mode=zigzag")


def check_pipeline(sizes: Mapping[str, Sequence[Size]], mesh: MeshConfig, shape: MeshShape, microbatches: int) -> None:
    """Refuse a size that `mesh.schedule` cannot split.

    Args:
        microbatches: of a step: optimizer.gradient_accumulation_steps.

    Raises:
        UserError: names the field, the axes, and what is divisible.
    """
    pp, rounds = shape["pp"], mesh.rounds_of_layers
    if pp == 1:
        return
    if rounds > 1 and microbatches % pp:
        raise UserError(
            f"optimizer.gradient_accumulation_steps {microbatches} is not divisible by mesh.pp {pp}, which "
            f"mesh.schedule interleaved needs: set it to {-(-microbatches // pp) * pp}, or set mesh.schedule=1f1b"
        )
    # each stage computes the loss of a part of the positions that a device has
    shards = parts(shape, training_rules(mesh), "block_seq")
    by_what = " x ".join(
        ["mesh.pp", *(f"mesh.{axis}" for axis in training_rules(mesh)["block_seq"] or () if shape[axis] > 1)]
    )
    for size in sizes["seq"]:
        check_multiple(size, by_what, pp * shards, "")


def check_multiple(size: Size, by_what: str, count: int, also: str, times: int = 1) -> None:
    """Refuse a size that `times` x `count` does not divide."""
    rounded, by = size.whole, times * count
    if rounded % by == 0:
        return
    what, below, above = f"{size.field} {size.value}", rounded // by * by, (rounded // by + 1) * by
    change = f"to {below} or {above}" if below else f"to {above}"
    divisors = sorted({1, *(n for n in _divisors(rounded) if rounded % (times * n) == 0)})
    smaller = max(n for n in divisors if n < count)
    needs = f"{times} x {by_what}" if times > 1 else by_what
    if size.multiple_field:
        what += f", rounded up to {rounded} by {size.multiple_field} {size.multiple},"
        remedy = f"{size.multiple_field} to {math.lcm(size.multiple, by)}, or {by_what} to {smaller}"
    elif size.field.startswith("model."):
        # the sizes of a trained model cannot be set
        allowed = listed(list(map(str, divisors)), most=_LISTED_DIVISORS)
        remedy = f"{by_what} to {allowed}, or {size.field} of a new model {change}"
    else:
        remedy = f"it {change}, or {by_what} to {smaller}"
    raise UserError(f"{what} is not divisible by {needs} {count}: set {remedy}{also}")


def _divisors(value: int) -> Iterator[int]:
    for small in range(1, math.isqrt(value) + 1):
        if value % small == 0:
            yield from (small, value // small)


def check_stages(decoder: Decoder, mesh: MeshConfig, shape: MeshShape) -> None:
    """Refuse stages over which no group of layers can be split.

    Raises:
        UserError: names the groups, and the sizes of mesh.pp that fit.
    """
    pp, rounds, groups = shape["pp"], mesh.rounds_of_layers, decoder.layer_groups
    if decoder.pipelined_group(mesh.virtual_stages(shape)) is not None:
        return
    if len(groups) == 1 and len(groups[0].period) == 1:
        also = ", or set mesh.schedule=1f1b" if rounds > 1 else ""
        check_multiple(Size("model.layers", groups[0].layers), "mesh.pp", pp, also, times=rounds)
    longest = max(group.repeats for group in groups)
    fit = [n for n in range(1, longest + 1) if n == 1 or decoder.pipelined_group(n * rounds) is not None]
    each = [f"{group.repeats} x {len(group.period)}" for group in groups]
    product = f"mesh.pp {pp} x mesh.rounds {rounds}" if rounds > 1 else f"mesh.pp {pp}"
    raise UserError(
        f"{product} divides no group of layers: the layers are {listed(each)} (repeats x layers of a period), and "
        f"stages share out the repeats of one group: set mesh.pp to {listed(list(map(str, fit)))}"
    )
