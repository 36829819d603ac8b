"""Loops over layers: over stacked layers, whose modules may differ; over layers one after the other; and over layers
whose caches differ in length.

In the last two, `body` computes a layer: (residual stream, view), (parameters, (index in the view, window)) ->
(residual stream, view), named means. Shapes: B sequences, T positions, D residual width, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesh_transformer.models.modules import Means
from mesh_transformer.ops.attend.cached import KeyValueView

Members = Mapping[str, Sequence[int]]
"""The layers that have each module of "blocks", ascending. The parameters of a module are stacked over these layers."""


def scan_layers(
    layer: Callable[..., Any], carry: Any, blocks: Any, own: Any, members: Members | None, unroll: int
) -> tuple[Any, Means]:
    """A loop over stacked layers: the last carry, and the means of the layers that have any, stacked.

    Args:
        layer: computes one: carry, (its parameters, its part of `own`) -> carry, named means.
        own: arrays with a leading layer dimension, or None.
        members: None: all layers have all modules, and one loop computes them. Else each of the `layer_runs` is a loop,
            of which a step computes a turn.
        unroll: steps of a loop that are one in the program.
    """
    if members is None:
        return jax.lax.scan(layer, carry, (blocks, own), unroll=unroll)
    kinds, means = kinds_of(members), []
    for run in layer_runs(kinds):
        stop = run.start + len(run.turn) * run.repeats
        # of each module, the rows of the run by step: (steps, layers of a turn that have it, ...)
        of_steps = functools.partial(jax.tree.map, lambda x, run=run: x.reshape(run.repeats, -1, *x.shape[1:]))
        parts, own_part = of_steps(layers_between(blocks, own, members, run.start, stop))
        carry, of_run = jax.lax.scan(functools.partial(_turn, layer, run.turn), carry, (parts, own_part), unroll=unroll)
        means.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), of_run))
    return carry, _joined(jnp.concatenate, means)


def _turn(layer: Callable[..., Any], turn: Sequence[frozenset[str]], carry: Any, step: Any) -> tuple[Any, Means]:
    """The layers of a turn, one after the other."""
    (parts, own), used, means = step, dict.fromkeys(step[0], 0), []
    for offset, modules in enumerate(turn):
        block = {}
        for name in modules:
            block[name] = jax.tree.map(lambda x, row=used[name]: x[row], parts[name])
            used[name] += 1
        carry, of_layer = layer(carry, (block, jax.tree.map(lambda x, row=offset: x[row], own)))
        means.append(of_layer)
    return carry, _joined(jnp.stack, means)


def kinds_of(members: Members) -> list[frozenset[str]]:
    """The modules of each layer."""
    layers = 1 + max(max(some) for some in members.values())
    return [frozenset(name for name, some in members.items() if layer in some) for layer in range(layers)]


def leading_layers(members: Members | None) -> int:
    """The layers before the last ones that are all of one kind."""
    kinds = [] if members is None else kinds_of(members)
    return max((layer + 1 for layer, kind in enumerate(kinds) if kind != kinds[-1]), default=0)


def layers_between(blocks: Any, own: Any, members: Members, start: int, stop: int) -> tuple[Any, Any]:
    """The parameters and the part of `own` of the layers from `start` to `stop`: each module stacked over those that
    have it."""
    spans = {name: _span(members[name], start, stop) for name in blocks}
    parts = {
        name: jax.tree.map(functools.partial(_slice, *span), blocks[name])
        for name, span in spans.items()
        if span[0] < span[1]
    }
    return parts, jax.tree.map(functools.partial(_slice, start, stop), own)


def layer_of(blocks: Any, members: Members | None, layer: int) -> Any:
    """The parameters of one layer."""
    if members is None:
        return jax.tree.map(lambda x: x[layer], blocks)
    rows = {name: members[name].index(layer) for name in blocks if layer in members[name]}
    return {name: jax.tree.map(lambda x, row=row: x[row], blocks[name]) for name, row in rows.items()}


def _slice(start: int, stop: int, x: jax.Array) -> jax.Array:
    # a slice of all rows is not a copy
    return x if (start, stop) == (0, len(x)) else x[start:stop]


def _span(members: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """The rows of a module's stack that belong to the layers from `start` to `stop`."""
    return sum(member < start for member in members), sum(member < stop for member in members)


def _joined(join: Callable[..., Any], means: Sequence[Means]) -> Means:
    """The means of the layers that have any."""
    some = [one for one in means if one]
    return jax.tree.map(lambda *layers: join(layers), *some) if some else {}


def unrolled(
    body: Callable[..., Any],
    params: Any,
    windows_L: jax.Array | None,
    x_BTD: jax.Array,
    cache: Any,
    query_index_B: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """The layers one after the other, each with its own arrays. The last computes only the queries of
    `query_index_B`."""
    # layers of equal shapes are traced once
    one = jax.jit(body)
    views, view_of = ([None], [0] * len(params)) if cache is None else cache.split(len(params))
    for index, (block, at) in enumerate(zip(params, view_of, strict=True)):
        last = cache is not None and index == len(params) - 1
        layer = block, (0, None if windows_L is None else windows_L[index])
        (x_BTD, views[at]), _ = one((x_BTD, views[at]), layer, query_index_B if last else None)
    return x_BTD, None if cache is None else cache.joined(views)


class LayerRun(NamedTuple):
    """Consecutive layers from `start` on: the kinds of `turn` one after the other, `repeats` times."""

    start: int
    turn: tuple[Any, ...]
    repeats: int


def layer_runs(kinds: Sequence[Any]) -> list[LayerRun]:
    """The layers in few runs, given the kind of each. A run takes as many layers as it can; its turn is short."""
    runs: list[LayerRun] = []
    start = 0
    while start < len(kinds):
        left = tuple(kinds[start:])
        turns = [left[:size] for size in range(1, len(left) // 2 + 1)]
        repeated = [(turn, count) for turn in turns if (count := _repeats(left, turn)) > 1]
        turn, repeats = max(repeated, key=lambda found: len(found[0]) * found[1], default=(left[:1], 1))
        runs.append(LayerRun(start, turn, repeats))
        start += len(turn) * repeats
    return runs


def _repeats(kinds: tuple[Any, ...], turn: tuple[Any, ...]) -> int:
    """How many times `turn` stands one after the other at the beginning of `kinds`."""
    return next(n for n in range(len(kinds) // len(turn), 0, -1) if kinds[: n * len(turn)] == turn * n)


def in_runs(
    body: Callable[..., Any],
    params: Any,
    members: Members | None,
    windows: Sequence[int | None],
    x_BTD: jax.Array,
    cache: KeyValueView,
    unroll: int,
) -> tuple[jax.Array, Any]:
    """Stacked layers whose caches are not all of one length: a loop for each of the `layer_runs`.

    A step of a loop computes a turn of the run, so that each layer in it has a view of its own length. `unroll` steps of
    a loop are one in the program.
    """
    views, view_of = cache.split(len(windows))
    places_L = _places(view_of)
    kinds = [frozenset(params)] * len(windows) if members is None else kinds_of(members)
    rows = {name: _places([name in kind for kind in kinds]) for name in params}
    carry = x_BTD, tuple(views)
    for run in layer_runs(list(zip(view_of, windows, kinds, strict=True))):

        def turn(carry: Any, first: jax.Array, run: LayerRun = run) -> tuple[Any, None]:
            x_BTD, views = carry[0], list(carry[1])
            for offset, (at, window, kind) in enumerate(run.turn):
                layer = first + offset
                block = {name: _row(params[name], rows[name][layer]) for name in kind}
                (x_BTD, views[at]), _ = body((x_BTD, views[at]), (block, (places_L[layer], window)))
            return (x_BTD, tuple(views)), None

        firsts = run.start + len(run.turn) * jnp.arange(run.repeats)
        carry, _ = jax.lax.scan(turn, carry, firsts, unroll=unroll)
    x_BTD, written = carry
    return x_BTD, cache.joined(written)


def _places(groups: Sequence[Any]) -> jax.Array:
    """The place of each layer among those of its own group, int32 (L,)."""
    return jnp.asarray([groups[:layer].count(group) for layer, group in enumerate(groups)])


def _row(leaves: Any, row: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, row, keepdims=False), leaves)
