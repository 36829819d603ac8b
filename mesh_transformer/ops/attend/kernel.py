"""The interface of an attention kernel, and the properties of an attention that a kernel may refuse.

Shapes: as in `ops.attend.causal`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec as P

from mesh_transformer.accelerators import CompileTarget
from mesh_transformer.parallel.sharding import Partition, Specs, Tree

Windows = tuple[int | None, ...]
"""The distinct windows of the layers of a loop; None for layers without a window."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The properties of an attention of whole sequences that are known before a program is compiled."""

    target: CompileTarget
    # the positions to which a device attends at once
    length: int
    # dims of a head of queries and keys, and of values
    head_dim: int
    value_dim: int
    dtype: str
    bias: bool = False
    segments: bool = False
    softcap: bool = False
    # windows of `length` positions or more count as None; None if the possible windows are unknown
    windows: Windows | None = (None,)
    # `mesh.context_mode`, where keys of other devices arrive block by block; None if a device has all keys
    ring: str | None = None

    @property
    def heads(self) -> str:
        """The properties that may differ between layers of a model, such as `192x128` and `64x64 softcap`."""
        return f"{self.head_dim}x{self.value_dim}{' softcap' if self.softcap else ''}"


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of an `Attend`, as a kernel gets them."""

    q_BTHK: jax.Array
    k_BTJK: jax.Array
    v_BTJV: jax.Array
    segments_BT: jax.Array | None
    scale: float
    softcap: float | None
    windows: Windows
    # int32: the index of this layer's window in `windows`; None if `windows` has only one
    window_index: jax.Array | None


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """A kernel of attention. `ops.attend.kernels` has the table."""

    refuses: Callable[[Case], str | None]
    """Why it cannot compute a case, in the words after "compute.attention NAME"; None if it can."""
    unsupported: Callable[[], str | None]
    """Why it does not work with the installed JAX, whose private names it uses, in the same words; None if it works."""
    attend: Callable[[Partition, Call], jax.Array]
    """The output of attention, (B, T, H, V) of q's dtype."""


def changed_arguments(module: str, name: str, *known: Sequence[str]) -> str | None:
    """Why a function of JAX cannot be used, in the words of `AttentionKernel.unsupported`: it is gone, or the names of
    its arguments, in order, are not in `known`. None if it can."""
    try:
        parameters = tuple(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    except (ImportError, AttributeError):
        return f"does not work with JAX {jax.__version__}, which has no {module}.{name}"
    if parameters in map(tuple, known):
        return None
    return (
        f"does not work with JAX {jax.__version__}, whose {module}.{name} has other arguments: {', '.join(parameters)}"
    )


def on_each_device(
    partition: Partition, function: Callable[..., Tree], in_specs: Specs, out_specs: Specs
) -> Callable[..., Tree]:
    """`function` of the arrays of one device. XLA cannot split a kernel: no axis of the mesh is left to it."""
    mesh = partition.current_mesh
    taken = jax.sharding.get_abstract_mesh().manual_axes
    axes = {axis for axis in mesh.axis_names if axis not in taken}
    # a kernel does not say over which axes its results differ
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def split_heads(partition: Partition) -> P:
    """How devices split (B, T, H, K): by sequences and by heads."""
    return partition.spec(("batch", None, "heads", None))
