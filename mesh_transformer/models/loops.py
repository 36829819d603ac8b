"""Loops over layers that are not a single scan: layers one after the other, and layers whose caches differ in length.

`body` computes a layer: (residual stream, view), (parameters, index in the view, window) -> (residual stream, view),
named sums. Shapes: B sequences, T positions, D residual width, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesh_transformer.ops.attend.cached import KeyValueView

Aux = dict[str, jax.Array]
"""Named sums over tokens, each with a leading layer dimension."""


def unrolled(
    body: Callable[..., Any],
    params: Any,
    windows_L: jax.Array | None,
    x_BTD: jax.Array,
    cache: Any,
    query_index_B: jax.Array | None,
) -> tuple[jax.Array, Any, Aux]:
    """The layers one after the other, each with its own arrays. The last computes only the queries of
    `query_index_B`."""
    # layers of equal shapes are traced once
    one = jax.jit(body)
    views, view_of = ([None], [0] * len(params)) if cache is None else cache.split(len(params))
    sums = []
    for index, (block, at) in enumerate(zip(params, view_of, strict=True)):
        last = cache is not None and index == len(params) - 1
        layer = block, 0, None if windows_L is None else windows_L[index]
        (x_BTD, views[at]), aux = one((x_BTD, views[at]), layer, query_index_B if last else None)
        sums.append(aux)
    aux = jax.tree.map(lambda *layers: jnp.stack(layers), *sums)
    return x_BTD, None if cache is None else cache.joined(views), aux


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
    windows: Sequence[int | None],
    x_BTD: jax.Array,
    cache: KeyValueView,
    unroll: int,
) -> tuple[jax.Array, Any, Aux]:
    """Stacked layers whose caches are not all of one length: a loop for each of the `layer_runs`.

    A step of a loop computes a turn of the run, so that each layer in it has a view of its own length. `unroll` steps of
    a loop are one in the program.
    """
    views, view_of = cache.split(len(windows))
    places_L = jnp.asarray([view_of[:layer].count(at) for layer, at in enumerate(view_of)])
    carry, sums = (x_BTD, tuple(views)), []
    for run in layer_runs(list(zip(view_of, windows, strict=True))):

        def turn(carry: Any, first: jax.Array, run: LayerRun = run) -> tuple[Any, Aux]:
            x_BTD, views = carry[0], list(carry[1])
            sums = []
            for offset, (at, window) in enumerate(run.turn):
                layer = first + offset
                block = jax.tree.map(lambda x, i=layer: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), params)
                (x_BTD, views[at]), aux = body((x_BTD, views[at]), (block, places_L[layer], window))
                sums.append(aux)
            return (x_BTD, tuple(views)), jax.tree.map(lambda *layers: jnp.stack(layers), *sums)

        firsts = run.start + len(run.turn) * jnp.arange(run.repeats)
        carry, aux = jax.lax.scan(turn, carry, firsts, unroll=unroll)
        sums.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux))
    x_BTD, written = carry
    return x_BTD, cache.joined(written), jax.tree.map(lambda *runs: jnp.concatenate(runs), *sums)
