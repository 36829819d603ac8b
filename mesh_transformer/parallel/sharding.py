"""Named dimensions, and the rules that map the names to mesh axes.

A model names the dimensions of its parameters (in its specification; `with_axes` in a model of one's own) and
activations (`constrain`). A parallel strategy is a table from these names to mesh axes. A model's code has no devices.
Without an active `Partition`, `constrain` and `gather_weights` are the identity, so that the same model runs on one CPU
and on a pod.

`Axes` are the names of an array's dimensions, `MeshAxes` the axes of the mesh that split one of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import haiku as hk
import jax
import numpy as np
from haiku.initializers import Initializer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from mesh_transformer.accelerators import CompileTarget
from mesh_transformer.config.mesh import MeshAxes, MeshConfig, Rules, moment_rules
from mesh_transformer.errors import UserError
from mesh_transformer.spec import Axes, AxesTree

Params = dict[str, Any]
"""The parameters of a model, {"embed": ..., "blocks": ..., "head": ...}, or of one of these stages, by Haiku module and
name. Their gradients, moments, dtypes and dimension names are trees of the same form."""
Block = dict[str, Any]
"""The parameters of one layer, by module; or of several layers, each array with a leading dimension: the layers that
have the module. In a model with several groups of layers, the names of the modules of all layers begin with the number
of the group (`spec.in_group`)."""
Specs = PartitionSpec | Sequence["Specs"] | Mapping[str, "Specs"]
"""How a tree of arrays is split: one PartitionSpec may stand for a whole branch of the tree."""
# a function of trees of arrays returns a tree like the one that it is given
Tree = TypeVar("Tree")
# `jax.shard_map` keeps the signature of a function
Function = TypeVar("Function", bound=Callable[..., Any])


class WithAxes:
    """An initializer with the dimension names of its parameter."""

    def __init__(self, init: Initializer, axes: Axes):
        self.init, self.axes = init, axes

    def __call__(self, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        if len(shape) != len(self.axes):
            raise UserError(f"a parameter of shape {tuple(shape)} cannot have dimensions {self.axes}")
        return self.init(shape, dtype)


def with_axes(init: Initializer, *axes: str | None) -> WithAxes:
    """Name the dimensions of the parameter that `init` makes."""
    return WithAxes(init, axes)


def collect_axes(function: Callable[[], object]) -> dict[str, dict[str, Axes]]:
    """The dimension names of every parameter that a function of Haiku modules creates, without computing them.

    Returns a tree with the structure of the parameters and tuples of names as leaves.

    Raises:
        UserError: a parameter has no names, or another number of names than dimensions; the message names it.
    """
    axes: dict[str, dict[str, Axes]] = {}

    def creator(
        make: Callable[..., jax.Array], shape: Sequence[int], dtype: DTypeLike, initialize: Initializer, context: Any
    ) -> jax.Array:
        if not isinstance(initialize, WithAxes):
            raise UserError(f"parameter {context.full_name} has no dimension names: wrap its initializer in with_axes")
        axes.setdefault(context.module_name or "~", {})[context.name] = initialize.axes
        return make(shape, dtype, initialize)

    def named() -> object:
        with hk.custom_creator(creator, state=False):
            return function()

    jax.eval_shape(hk.transform(named).init, jax.eval_shape(lambda: jax.random.key(0)))
    return axes


@dataclasses.dataclass(frozen=True)
class Partition:
    """A mesh and rules, which turn dimension names into shardings; the dimensions `whole` are never split.

    `context_mode` says how attention reads the positions of other devices, where `seq` is split. `overlap_tp` says
    whether the communication of `column` and `row` in `ops.linear` overlaps with its products. `attention` is
    `compute.attention`, or a `Setting` of `ops.attend.kernels`: which kernel computes attention. Sizes and specs need
    only an abstract mesh, which has no devices.

    Raises:
        UserError: a rule is not a tuple of axes of the mesh, or a name without a rule is used.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules
    whole: frozenset[str] = frozenset()
    context_mode: str = "zigzag"
    overlap_tp: bool = False
    attention: str | Mapping[str, str] = "auto"

    def __post_init__(self) -> None:
        for name, axes in self.rules.items():
            if not (axes is None or (isinstance(axes, tuple) and set(axes) <= set(self.mesh.axis_names))):
                raise UserError(
                    f"the rule of dimension {name} is {axes!r}: give None, or a tuple of the axes of the mesh, which "
                    f"are {', '.join(self.mesh.axis_names)}"
                )

    @property
    def devices(self) -> np.ndarray:
        """The devices of the mesh, an array of its shape."""
        if isinstance(self.mesh, AbstractMesh):
            raise ValueError("an abstract mesh has no devices")
        return self.mesh.devices

    @functools.cached_property
    def target(self) -> CompileTarget:
        """The kind of the mesh's devices."""
        return CompileTarget.of(self.devices.flat[0])

    def spec(self, axes: Axes) -> PartitionSpec:
        """The PartitionSpec of dimensions `axes`; a dimension named None is never split.

        Inside a `shard_map`, an array has only a device's part of what its axes split: they are left out.
        """
        return PartitionSpec(*map(self._split, axes))

    def _split(self, name: str | None) -> MeshAxes:
        over = None if name is None or name in self.whole else self._rule(name)
        taken = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(axis for axis in over or () if axis not in taken) or None

    def axes(self, *names: str) -> tuple[str, ...]:
        """The mesh axes that split any of the dimensions `names`, as in `spec`."""
        return tuple(dict.fromkeys(axis for name in names for axis in self._split(name) or ()))

    def taken(self, *names: str) -> tuple[str, ...]:
        """The mesh axes that would split the dimensions `names`, but belong to a `shard_map` around this code."""
        taken = jax.sharding.get_abstract_mesh().manual_axes
        axes = (axis for name in names if name not in self.whole for axis in self._rule(name) or ())
        return tuple(dict.fromkeys(axis for axis in axes if axis in taken))

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes that split only the batch: their devices have equal weights."""
        others = {axis for name, axes in self.rules.items() if name != "batch" for axis in axes or ()}
        return tuple(axis for axis in self.rules["batch"] or () if axis not in others)

    @property
    def residual_axis(self) -> str | None:
        """The axis of several devices that splits positions of the residual stream only: tp with
        mesh.shard_activations. None without such an axis."""
        others = self.rules["seq"] or ()
        axes = (axis for axis in self.rules["block_seq"] or () if axis not in others and self.mesh.shape[axis] > 1)
        return next(axes, None)

    @property
    def current_mesh(self) -> Mesh | AbstractMesh:
        """The mesh; inside a `shard_map`, the mesh that knows which axes are taken."""
        around = jax.sharding.get_abstract_mesh()
        return around if around.manual_axes else self.mesh

    def sharding(self, *axes: str | None) -> NamedSharding:
        """The sharding of an array with dimensions `axes`."""
        return NamedSharding(self.current_mesh, self.spec(axes))

    def shardings(self, axes_tree: AxesTree) -> Any:
        """The shardings of a tree of dimension names."""
        return map_axes(lambda axes: self.sharding(*axes), axes_tree)

    def abstract(self, tree: Tree, axes_tree: AxesTree) -> Tree:
        """The shapes and dtypes of a tree of arrays, with the shardings of their dimension names."""
        return jax.tree.map(
            lambda x, split: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), tree, self.shardings(axes_tree)
        )

    def with_rules(self, **rules: MeshAxes) -> Partition:
        """This partition with other rules for some names."""
        return dataclasses.replace(self, rules={**self.rules, **rules})

    def keep_whole(self, name: str) -> Partition:
        """This partition without a split of dimension `name`, under any rules: no axis divides its size."""
        return dataclasses.replace(self, whole=self.whole | {name})

    def size(self, name: str | None) -> int:
        """The number of parts into which dimension `name` is split; 1 if every device holds all of it.

        Inside a `shard_map`: the parts of an array there, as in `spec`.
        """
        return math.prod(self.mesh.shape[axis] for axis in self._split(name) or ())

    def _rule(self, name: str) -> MeshAxes:
        if name not in self.rules:
            raise UserError(f"dimension {name} has no rule: name one of {', '.join(self.rules)}, or add a rule for it")
        return self.rules[name]

    @property
    def zero1(self) -> Partition:
        """The partition of gradients and optimizer state that the data-parallel devices split too (ZeRO-1)."""
        return self.with_rules(embed=moment_rules(MeshConfig(zero1=True))["embed"])

    def sequence_order(self, length: int) -> np.ndarray | None:
        """The positions of a sequence in the order in which the devices that split it hold them, (length,) int32; None
        for ascending order.

        With zigzag, device i of n holds the chunks i and 2 n - 1 - i of 2 n. Causal attention to them is the same work
        for each device.
        """
        n = self.size("seq")
        if n == 1 or self.context_mode != "zigzag":
            return None
        chunks = np.arange(length, dtype=np.int32).reshape(2 * n, -1)
        return np.concatenate([chunks[[i, -1 - i]].reshape(-1) for i in range(n)])

    @property
    def splits_weights(self) -> bool:
        """Whether weights must be gathered over a data-parallel axis before use."""
        return self.size("embed") > 1


_ACTIVE: contextvars.ContextVar[Partition | None] = contextvars.ContextVar("partition", default=None)


@contextlib.contextmanager
def use(partition: Partition | None) -> Iterator[None]:
    """Trace the enclosed model code for `partition`."""
    token = _ACTIVE.set(partition)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active() -> Partition | None:
    """The partition for which code is traced now, if any."""
    return _ACTIVE.get()


def platform() -> str:
    """The platform of the active partition's devices; without one, of JAX's default device."""
    partition = active()
    return jax.default_backend() if partition is None else partition.target.platform


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain the sharding of activation `x` by its dimension names; the identity without a partition."""
    partition = active()
    if partition is None:
        return x
    return jax.lax.with_sharding_constraint(x, partition.sharding(*axes))


def constrain_tree(tree: Tree, partition: Partition, axes_tree: AxesTree) -> Tree:
    """Constrain the shardings of a tree of parameters, gradients or moments."""
    return jax.lax.with_sharding_constraint(tree, partition.shardings(axes_tree))


def gather_weights(params: Tree, axes_tree: AxesTree) -> Tree:
    """Gather the parameters that fsdp splits, just before their use; they stay split over tp.

    The backward pass sums and scatters their gradients at once. It constrains them to the gathered layout and then to
    the split one: a sum and a slice, which the compiler fuses into a reduce-scatter. So weights and gradients of at
    most one layer are gathered at a time, and the split does not spread to activations. The identity if fsdp splits no
    weights.
    """
    partition = active()
    if partition is None or not partition.splits_weights:
        return params
    # "embed", the residual width, is the only dimension of a weight that fsdp splits
    gathered, split = partition.with_rules(embed=None).shardings(axes_tree), partition.shardings(axes_tree)

    def forward(params: Tree) -> Tree:
        return jax.lax.with_sharding_constraint(params, gathered)

    def backward(_: None, gradients: Tree) -> tuple[Tree]:
        summed = jax.lax.with_sharding_constraint(gradients, gathered)
        return (jax.lax.with_sharding_constraint(summed, split),)

    gather = jax.custom_vjp(forward)
    # `forward`, not `gather`: a rematerialization policy sees the primitives of the forward rule
    gather.defvjp(lambda params: (forward(params), None), backward)
    return gather(params)


def map_axes(function: Callable[[Axes], object], axes_tree: AxesTree) -> Any:
    """`jax.tree.map` over a tree whose leaves are tuples of dimension names."""
    return jax.tree.map(function, axes_tree, is_leaf=lambda node: isinstance(node, tuple))
