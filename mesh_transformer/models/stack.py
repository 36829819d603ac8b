"""The loop over layers, for training, scoring, prefill and decode, and the types of its inputs and outputs.

Layers come in groups (`spec.layer_groups`): a period of kinds that repeats. The parameters of a module are stacked by
group, over the layers of the group that have the module. One scan computes the repeats of a group. Inside it, layers of
one kind that follow each other are a scan of their own: a period of six layers that stood in the program one by one
would take twice as long to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from mesh_transformer.parallel.sharding import Block, Tree
from mesh_transformer.spec import LayerGroup, in_group, layer_groups_of, neighbours, starts

# The name of the loop over layers in the op_name of compiled programs and in profiles.
LAYER_LOOP = "blocks"
Means = dict[str, jax.Array]
"""Named means over the tokens of a layer, float32. The means of several layers have a leading dimension: the layers
that have the mean."""
Batch = Any
"""A microbatch: an array or a tree of arrays, whose first dimension is B. The arrays of a step have a dimension A
before it."""
Results = Any
"""The outputs of a loss for the metrics: arrays (B, T, ...), or None."""
Shared = Any
"""A tree of arrays that all layers read, or None."""


class Stream(NamedTuple):
    """The input of a layer, beside its parameters."""

    x_BTD: jax.Array
    """The output of the layer before."""
    learned: Shared = None
    """Arrays for every layer that depend on the parameters of the embedding, and have a gradient; or None."""
    fixed: Shared = None
    """Arrays for every layer that depend on the batch only, such as the angles of rotary encoding; or None."""


Rows = Any
"""Arrays with a row for each layer, the row of one layer, or None. They have no gradient."""
# the carry of the loop over layers
Carry = TypeVar("Carry")


class Kind(NamedTuple):
    """Layers that have the same modules and that one function computes."""

    layer: Any
    """The computation of one of these layers. In `Parameters.layer_groups`: its specification. In
    `ModelFunctions.layer_groups`: a function with the signature of `ModelFunctions.layer`, or None for
    `ModelFunctions.layer`. In `by_row`: a pair of one of these and a key."""
    modules: tuple[str, ...] | None = None
    """The modules of "blocks" that they have, or None for all modules. They are in order: the processes of a mesh must
    trace one program, and the order of a set of strings differs between processes."""


LayerGroups = Sequence[LayerGroup[Kind]]
Outputs = tuple[Any, Means]
"""(arrays or None, named means): the outputs of layers beside the carry. All layers have the same arrays; only some
kinds of layers have means."""
LayerFunction = Callable[[Kind, Carry, Block, Rows], tuple[Carry, Outputs]]
"""Computes a layer: (its kind, carry, its parameters, its row of each array by layer) -> carry, outputs."""


def by_group(blocks: Block, groups: LayerGroups) -> list[Block]:
    """The parameters of each group, by the modules' own names."""
    if len(groups) == 1:
        return [blocks]
    parts: list[Block] = []
    for number in range(len(groups)):
        prefix = in_group("", number, len(groups))
        parts.append({name.removeprefix(prefix): leaves for name, leaves in blocks.items() if name.startswith(prefix)})
    return parts


def joined_groups(parts: Sequence[Block]) -> Block:
    """The inverse of `by_group`."""
    return {in_group(name, i, len(parts)): leaves for i, part in enumerate(parts) for name, leaves in part.items()}


def rows_by_group(rows: Rows, groups: Sequence[LayerGroup[Any]]) -> list[Rows]:
    """Arrays with a row for each layer, cut into groups."""
    if len(groups) == 1:
        return [rows]
    ends = starts(groups)
    return [jax.tree.map(lambda x, a=a, b=b: x[a:b], rows) for a, b in zip(ends, ends[1:], strict=False)]


def over_layers(
    groups: LayerGroups, layer: LayerFunction[Carry], carry: Carry, blocks: Block, rows: Rows, *, unroll: int = 1
) -> tuple[Carry, Outputs]:
    """All layers in order: the last carry, and the outputs of the layers, stacked.

    Args:
        blocks: the parameters of all layers, stacked by group.
        rows: arrays with a row for each layer, or None.
        unroll: as in `jax.lax.scan`.
    """
    outputs = []
    for group, params, group_rows in zip(groups, by_group(blocks, groups), rows_by_group(rows, groups), strict=True):
        carry, out = over_group(group, layer, carry, params, group_rows, unroll=unroll)
        outputs.append(out)
    return carry, join(outputs)


def over_group(
    group: LayerGroup[Kind],
    layer: LayerFunction[Carry],
    carry: Carry,
    blocks: Block,
    rows: Rows,
    *,
    unroll: int,
    reverse: bool = False,
) -> tuple[Carry, Outputs]:
    """The layers of a group: the last carry, and the outputs, stacked. The last layer is the first if `reverse`."""
    together = neighbours(group.period)
    if len(together) == 1:
        step = functools.partial(_step, layer, group.period[0])
        return jax.lax.scan(step, carry, (blocks, rows), unroll=unroll, reverse=reverse)
    # the rows of each module by repeat: (repeats, layers of a period that have the module, ...)
    by_repeat = jax.tree.map(lambda x: x.reshape(group.repeats, -1, *x.shape[1:]), (blocks, rows))
    step = functools.partial(_period, layer, together, reverse)
    carry, outputs = jax.lax.scan(step, carry, by_repeat, unroll=unroll, reverse=reverse)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)


def _step(layer: LayerFunction[Carry], kind: Kind, carry: Carry, row: tuple[Block, Rows]) -> tuple[Carry, Outputs]:
    return layer(kind, carry, *row)


def _period(
    layer: LayerFunction[Carry],
    together: list[tuple[Kind, int]],
    reverse: bool,
    carry: Carry,
    period: tuple[Block, Rows],
) -> tuple[Carry, Outputs]:
    """The layers of one period."""
    (blocks, rows), used, start, parts = period, dict.fromkeys(period[0], 0), 0, []
    for kind, count in together:
        block = {}
        for name in kind.modules or blocks:
            block[name] = jax.tree.map(lambda x, a=used[name], n=count: x[a : a + n], blocks[name])
            used[name] += count
        parts.append((kind, count, (block, jax.tree.map(lambda x, a=start, n=count: x[a : a + n], rows))))
        start += count
    outputs = []
    for kind, count, several in reversed(parts) if reverse else parts:
        if count == 1:
            carry, out = layer(kind, carry, *jax.tree.map(lambda x: x[0], several))
            out = jax.tree.map(lambda x: x[None], out)
        else:
            carry, out = jax.lax.scan(functools.partial(_step, layer, kind), carry, several, reverse=reverse)
        outputs.append(out)
    return carry, join(outputs[::-1] if reverse else outputs)


def join(outputs: Sequence[Outputs]) -> Outputs:
    """The outputs of consecutive layers as one, each named mean over the layers that have it."""
    if len(outputs) == 1:
        return outputs[0]
    each = jax.tree.map(lambda *x: jnp.concatenate(x), *(each for each, _ in outputs))
    names = dict.fromkeys(name for _, means in outputs for name in means)
    return each, {name: jnp.concatenate([means[name] for _, means in outputs if name in means]) for name in names}


def by_row(
    groups: LayerGroups,
    keys: Sequence[object],
    layer: LayerFunction[Carry],
    carry: Carry,
    blocks: Block,
    rows: Rows,
    *,
    unroll: int = 1,
) -> Carry:
    """`over_layers` for layers whose keys are part of the program, such as the length of a cache: the last carry.

    Layers of one kind that have different keys are different kinds here: (layer, key) replaces `Kind.layer`. A group
    then becomes several loops. They read single rows of the group's stacks, so that no stack is cut.
    """
    for group, start, stacks in zip(groups, starts(groups), by_group(blocks, groups), strict=False):
        keyed = [Kind((kind.layer, keys[start + i]), kind.modules) for i, kind in enumerate(group.kinds)]
        same: dict[Kind, Kind] = {}
        used = dict.fromkeys(stacks, 0)

        def at_row(kind: Kind, carry: Carry, block: Block, row: Rows, stacks: Block = stacks) -> tuple[Carry, Outputs]:
            return layer(kind, carry, {name: row_of(stacks[name], at) for name, at in block.items()}, row)

        for part in layer_groups_of([same.setdefault(kind, kind) for kind in keyed]):
            counts = {name: sum(name in (kind.modules or stacks) for kind in part.kinds) for name in stacks}
            numbers = {name: jnp.arange(used[name], used[name] + n) for name, n in counts.items() if n}
            part_rows = jax.tree.map(lambda x, a=start, n=part.layers: x[a : a + n], rows)
            carry, _ = over_group(part, at_row, carry, numbers, part_rows, unroll=unroll)
            used = {name: used[name] + n for name, n in counts.items()}
            start += part.layers
    return carry


def row_of(leaves: Tree, row: jax.Array | int) -> Tree:
    """One row of stacked arrays."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, row, keepdims=False), leaves)
