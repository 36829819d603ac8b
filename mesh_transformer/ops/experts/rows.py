"""The rows that experts multiply: an order of a device's choices, and the way there and back.

Both ways are gathers, and so are their gradients: a sum by scatter has no fixed order on a GPU.

Shapes: N tokens, k choices of a token, M rows of a buffer, D width, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """A buffer with at most one row for each choice.

    Choice j of token t has the number j N + t: the first choices of all tokens come first.
    """

    # int32: the row of each choice; M for a choice without a row
    at_kN: jax.Array
    # int32: the token of each row, and its choice; N and k N for an empty row
    token_M: jax.Array
    choice_M: jax.Array
    # whether each choice has a row and no row is empty, so that no index needs a check
    full: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, at_kN: jax.Array, size: int, *, full: bool = False) -> Rows:
        """A buffer of `size` rows, from the row of each choice; a choice with row `size` has none.

        Args:
            full: whether every choice has a row and every row a choice.
        """
        choices, tokens = at_kN.size, at_kN.shape[1]
        numbers = jnp.arange(choices, dtype=jnp.int32)
        empty = jnp.full(size, choices, jnp.int32)
        choice_M = empty.at[at_kN.reshape(-1)].set(numbers, mode="drop", unique_indices=True)
        return cls(at_kN, jnp.where(choice_M < choices, choice_M % tokens, tokens), choice_M, full)

    @property
    def back(self) -> Rows:
        """The inverse permutation. It needs one choice per token and no empty row."""
        return Rows(self.choice_M[None], self.at_kN[0], self.at_kN[0], self.full)

    def take(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """x[index]; 0 where the index is out of bounds. The indices of a full buffer are in bounds."""
        if self.full:
            return x.at[index].get(mode="promise_in_bounds")
        return x.at[index].get(mode="fill", fill_value=0)


class Queues(NamedTuple):
    """The choices, sorted by expert, then by number."""

    # int32: the place of each choice in the whole order, and in the queue of its expert
    order_kN: jax.Array
    place_kN: jax.Array
    # int32: the choices of each expert
    sizes_E: jax.Array

    @classmethod
    def of(cls, experts_kN: jax.Array, experts: int) -> Queues:
        """The queues of `experts` experts. The number `experts` marks a choice without an expert, which comes last."""
        flat = experts_kN.reshape(-1)
        sorted_by = jnp.argsort(flat, stable=True)
        numbers = jnp.arange(flat.size, dtype=jnp.int32)
        order = jnp.zeros_like(numbers).at[sorted_by].set(numbers, unique_indices=True)
        sizes_E = jax.nn.one_hot(flat, experts, dtype=jnp.int32).sum(0)
        starts = jnp.pad(jnp.cumsum(sizes_E), (1, 0))
        place = order - starts[flat]
        return cls(order.reshape(experts_kN.shape), place.reshape(experts_kN.shape), sizes_E)


@jax.custom_vjp
def spread(x_ND: jax.Array, rows: Rows) -> jax.Array:
    """The token of each row: (N, D) -> (M, D). Empty rows are 0."""
    return rows.take(x_ND, rows.token_M)


def _spread_forward(x_ND: jax.Array, rows: Rows) -> tuple[jax.Array, Rows]:
    return spread(x_ND, rows), rows


def _spread_backward(rows: Rows, dy_MD: jax.Array) -> tuple[jax.Array, None]:
    return functools.reduce(operator.add, _of_choices(dy_MD, rows)).astype(dy_MD.dtype), None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def combine(y_MD: jax.Array, weights_kN: jax.Array, rows: Rows) -> jax.Array:
    """The weighted sum of the rows of each token, summed in float32: (M, D) -> (N, D) of y's dtype."""
    parts = [y_ND * w_N[:, None] for y_ND, w_N in zip(_of_choices(y_MD, rows), weights_kN, strict=True)]
    return functools.reduce(operator.add, parts).astype(y_MD.dtype)


def _combine_forward(
    y_MD: jax.Array, weights_kN: jax.Array, rows: Rows
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Rows]]:
    return combine(y_MD, weights_kN, rows), (y_MD, weights_kN, rows)


def _combine_backward(saved: tuple[jax.Array, jax.Array, Rows], dy_ND: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    y_MD, weights_kN, rows = saved
    weight_M = rows.take(weights_kN.reshape(-1), rows.choice_M)
    dy_MD = spread(dy_ND, rows).astype(jnp.float32) * weight_M[:, None]
    dweights_kN = jnp.stack([(y_ND * dy_ND.astype(jnp.float32)).sum(-1) for y_ND in _of_choices(y_MD, rows)])
    return dy_MD.astype(y_MD.dtype), dweights_kN, None


combine.defvjp(_combine_forward, _combine_backward)


def _of_choices(y_MD: jax.Array, rows: Rows) -> list[jax.Array]:
    """For each choice, its row of each token, (N, D) float32; 0 without a row. XLA for CPU is slow at a sum over an
    array of all choices."""
    return [rows.take(y_MD, at_N).astype(jnp.float32) for at_N in rows.at_kN]
