"""The computation of routed experts: gated feed-forward layers, of which each token goes through the chosen ones.

Shapes: B sequences, T positions, N tokens, k choices of a token, D width, E experts, F width of an expert, M rows, C
rows of each expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.ops.experts.grouped import grouped_matmul
from mesh_transformer.ops.experts.kernel import Arrays
from mesh_transformer.ops.experts.rows import Queues, Rows, combine, spread

Activation = Callable[[jax.Array], jax.Array]
# rows times each of several matrices
Matmul = Callable[[jax.Array, Arrays], Arrays]


class Weights(NamedTuple):
    """The matrices of the experts: activation(x gate) * (x in) times out."""

    gate_EDF: jax.Array
    in_EDF: jax.Array
    out_EFD: jax.Array

    def apply(self, x: jax.Array, matmul: Matmul, activation: Activation) -> jax.Array:
        """The outputs of rows x, multiplied by `matmul`."""
        gate, hidden = (checkpoint_name(y, "mlp_hidden") for y in matmul(x, (self.gate_EDF, self.in_EDF)))
        (y,) = matmul(activation(gate) * hidden, (self.out_EFD,))
        return y


class Choices(NamedTuple):
    """The experts of each token, int32, and the weights of their outputs, float32."""

    weights_Nk: jax.Array
    experts_Nk: jax.Array

    def after(self, first: jax.Array) -> Choices:
        """The same with expert `first` as number 0."""
        return self._replace(experts_Nk=self.experts_Nk - first)


def on_device(
    x_ND: jax.Array,
    choices: Choices,
    weights: Weights,
    activation: Activation,
    capacity: int | None,
    *,
    all_experts: bool,
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of the outputs of each token's experts: (N, D) -> (N, D).

    `all_experts` says that `weights` has the expert of every choice.

    A choice whose number is not that of an expert in `weights` adds nothing. With a capacity, neither do those beyond
    the first `capacity` of an expert, the first choices of all tokens before the second (Lepikhin et al. 2020,
    arXiv:2006.16668). Also returns the number of these, int32.
    """
    weights_Nk, experts_Nk = choices
    count = len(weights.gate_EDF)
    if not all_experts:
        known = (experts_Nk >= 0) & (experts_Nk < count)
        experts_Nk = jnp.where(known, experts_Nk, count)
    experts_kN = experts_Nk.T
    queues = Queues.of(experts_kN, count)
    if capacity is None:
        rows = Rows.of(queues.order_kN, experts_kN.size, full=True)
        y_MD = grouped(spread(x_ND, rows), queues, weights, activation, all_rows=all_experts)
        return combine(y_MD, weights_Nk.T, rows), jnp.zeros((), jnp.int32)
    rows = capacity_rows(queues, experts_kN, capacity)
    x_ECD = rearrange(spread(x_ND, rows), "(e c) d -> e c d", e=count)
    y_ECD = weights.apply(x_ECD, batched_matmul, activation)
    dropped = jnp.maximum(queues.sizes_E - capacity, 0).sum()
    return combine(rearrange(y_ECD, "e c d -> (e c) d"), weights_Nk.T, rows), dropped


def of_rows(x_MD: jax.Array, experts_M: jax.Array, weights: Weights, activation: Activation) -> jax.Array:
    """The output of each row's expert, 0 for a row whose number is beyond them: (M, D) -> (M, D)."""
    queues = Queues.of(experts_M[None], len(weights.gate_EDF))
    rows = Rows.of(queues.order_kN, len(x_MD), full=True)
    return spread(grouped(spread(x_MD, rows), queues, weights, activation, all_rows=False), rows.back)


def grouped(x_MD: jax.Array, queues: Queues, weights: Weights, activation: Activation, *, all_rows: bool) -> jax.Array:
    """The outputs of rows in the order of `queues`; `all_rows` as in `grouped_matmul`."""

    def matmul(x: jax.Array, w: Arrays) -> Arrays:
        return grouped_matmul(x, w, queues.sizes_E, all_rows=all_rows)

    return weights.apply(x_MD, matmul, activation)


def capacity_rows(queues: Queues, experts_kN: jax.Array, capacity: int) -> Rows:
    """A buffer (E C) with the first `capacity` choices of each expert."""
    size = len(queues.sizes_E) * capacity
    fits = (queues.place_kN < capacity) & (experts_kN < len(queues.sizes_E))
    return Rows.of(jnp.where(fits, experts_kN * capacity + queues.place_kN, size), size)


def batched_matmul(x_ECD: jax.Array, w_EDF: Arrays) -> Arrays:
    """The products of each expert's rows: (E, C, D), (E, D, F) each -> (E, C, F) each, of x's dtype."""
    return tuple(jnp.einsum("ecd,edf->ecf", x_ECD, w, preferred_element_type=x_ECD.dtype) for w in w_EDF)
