"""The computation of routed experts: each token goes through the feed-forward layers that it chose.

Shapes: B sequences, T positions, N tokens, k choices of a token, D width, E experts, F width of an expert, M rows, C
rows of each expert, n devices that split the experts, e = E / n experts of a device.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.ops.experts.grouped import grouped_matmul
from mesh_transformer.ops.experts.kernel import Arrays
from mesh_transformer.ops.experts.rows import Queues, Rows, combine, spread
from mesh_transformer.ops.linear import Matrix, SumOfTerms, sum_of_products, terms_of

Activation = Callable[[jax.Array], jax.Array]


class Biases(NamedTuple):
    """The biases of the experts' matrices; None for a matrix without one."""

    gate_EF: jax.Array | None = None
    in_EF: jax.Array | None = None
    out_ED: jax.Array | None = None


NO_BIASES = Biases()
# rows times each of several matrices, each product plus a bias, if there is one
Affine = Callable[[jax.Array, Arrays, Sequence[jax.Array | None]], Arrays]


class ExpertWeights(NamedTuple):
    """The parameters of the experts: (activation(x gate) * (x in)) out, or activation(x in) out without a gate; each
    product plus its bias, if there is one."""

    gate_EDF: Matrix | None
    in_EDF: Matrix
    out_EFD: Matrix
    biases: Biases = NO_BIASES

    def with_out_bias(self, function: Callable[[jax.Array], jax.Array]) -> ExpertWeights:
        """The same with function(bias of the outputs), if there is one."""
        b_ED = self.biases.out_ED
        return self if b_ED is None else self._replace(biases=self.biases._replace(out_ED=function(b_ED)))

    def apply(self, x: jax.Array, affine: Affine, activation: Activation) -> jax.Array:
        """The outputs of rows x, whose products are made by `affine`."""
        products = _of_terms(affine)
        if self.gate_EDF is None:
            hidden = products(x, (self.in_EDF,), (self.biases.in_EF,))
        else:
            hidden = products(x, (self.gate_EDF, self.in_EDF), (self.biases.gate_EF, self.biases.in_EF))
        first, *others = (checkpoint_name(y, "mlp_hidden") for y in hidden)
        mixed = functools.reduce(operator.mul, others, activation(first))
        (y,) = products(mixed, (self.out_EFD,), (self.biases.out_ED,))
        return y


def _of_terms(affine: Affine) -> Callable[[jax.Array, Sequence[Matrix], Sequence[jax.Array | None]], Arrays]:
    """`affine` of arrays, and of matrices that are sums. Their first terms have the scale 1 and get the biases, and
    those that are one matrix are multiplied together."""

    def product(x: jax.Array, w: Matrix) -> jax.Array:
        (y,) = affine(x, cast(Arrays, (w,)), (None,))
        return y

    def run(x: jax.Array, ws: Sequence[Matrix], bs: Sequence[jax.Array | None]) -> Arrays:
        if not any(isinstance(w, SumOfTerms) for w in ws):
            return affine(x, cast(Arrays, ws), bs)
        terms = [terms_of(w) for w in ws]
        together = cast(Arrays, tuple(of[0].factors[0] for of in terms if of[0].is_matrix))
        of_together = [b for of, b in zip(terms, bs, strict=True) if of[0].is_matrix]
        products, ys = iter(affine(x, together, of_together) if together else ()), []
        for (first, *others), b in zip(terms, bs, strict=True):
            if first.is_matrix:
                y = next(products)
            else:
                (y,) = affine(product(x, first.factors[0]), cast(Arrays, first.factors[1:]), (b,))
            if others:
                y = y + sum_of_products(others, x, product, product, product)
            ys.append(y)
        return tuple(ys)

    return run


class Choices(NamedTuple):
    """The experts of each token, int32, which differ, and the weights of their outputs, float32."""

    weights_Nk: jax.Array
    experts_Nk: jax.Array

    def after(self, first: jax.Array) -> Choices:
        """The same with expert `first` as number 0."""
        return self._replace(experts_Nk=self.experts_Nk - first)


def on_device(
    x_ND: jax.Array,
    choices: Choices,
    weights: ExpertWeights,
    activation: Activation,
    capacity: int | None,
    *,
    all_experts: bool,
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of the outputs of each token's experts: (N, D) -> (N, D).

    `all_experts` says that `weights` has the expert of every choice.

    Choices of experts that `weights` lacks add 0. With a capacity, an expert computes its first `capacity` choices, the
    first choices of all tokens before the second (Lepikhin et al. 2020, arXiv:2006.16668). Its later choices are
    dropped: they add 0 too. Also returns the number of dropped choices, int32.
    """
    weights_Nk, experts_Nk = choices
    count = len(weights.in_EDF)
    if not all_experts:
        known = (experts_Nk >= 0) & (experts_Nk < count)
        experts_Nk = jnp.where(known, experts_Nk, count)
    experts_kN = experts_Nk.T
    queues = Queues.of(experts_kN, count)
    if capacity is None:
        rows = Rows.of(queues.order_kN, experts_kN.size, full=True)
        y_MD = grouped(spread(x_ND, rows), queues, weights, activation, all_rows=all_experts)
        return combine(y_MD, weights_Nk.T, rows), jnp.zeros((), jnp.int32)
    rows = _capacity_rows(queues, experts_kN, capacity)
    x_ECD = rearrange(spread(x_ND, rows), "(e c) d -> e c d", e=count)
    y_ECD = weights.apply(x_ECD, _batched_affine, activation)
    dropped = jnp.maximum(queues.sizes_E - capacity, 0).sum()
    return combine(rearrange(y_ECD, "e c d -> (e c) d"), weights_Nk.T, rows), dropped


def exchanged(
    x_ND: jax.Array,
    choices: Choices,
    weights: ExpertWeights,
    activation: Activation,
    capacity: int | None,
    axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """As `on_device`, on the devices of a `shard_map` that split the experts over the mesh axes `axes`: `weights` has
    the e experts of the device, and `choices` are among all E. Each choice goes to the device of its expert, and its
    output comes back, by two all-to-alls."""
    devices, experts_per_device = jax.lax.axis_size(axes), len(weights.in_EDF)
    experts_kN = choices.experts_Nk.T
    queues = Queues.of(experts_kN, devices * experts_per_device)
    if capacity is None:
        return _exchanged_all(x_ND, choices, queues, weights, activation, axes), jnp.zeros((), jnp.int32)
    rows = _capacity_rows(queues, experts_kN, capacity)
    sent = rearrange(spread(x_ND, rows), "(n e c) d -> n e c d", n=devices, e=experts_per_device)
    x_ECD = rearrange(_swap(sent, axes), "n e c d -> e (n c) d")
    y_ECD = weights.apply(x_ECD, _batched_affine, activation)
    back = _swap(rearrange(y_ECD, "e (n c) d -> n e c d", n=devices), axes)
    y_ND = combine(rearrange(back, "n e c d -> (n e c) d"), choices.weights_Nk.T, rows)
    return y_ND, jnp.maximum(queues.sizes_E - capacity, 0).sum()


def _exchanged_all(
    x_ND: jax.Array,
    choices: Choices,
    queues: Queues,
    weights: ExpertWeights,
    activation: Activation,
    axes: tuple[str, ...],
) -> jax.Array:
    """The outputs of all choices. The experts of a token differ, so at most min(k, e) of its choices go to one device:
    each device has room for N min(k, e) rows of each other device."""
    (tokens, chosen), experts_per_device = choices.experts_Nk.shape, len(weights.in_EDF)
    size = tokens * min(chosen, experts_per_device)
    counts_ne = queues.sizes_E.reshape(-1, experts_per_device)
    ends_n = jnp.cumsum(counts_ne.sum(1))
    device_kN = choices.experts_Nk.T // experts_per_device
    place_kN = queues.order_kN - (ends_n - counts_ne.sum(1))[device_kN]
    rows = Rows.of(device_kN * size + place_kN, len(counts_ne) * size)
    sent = rearrange(spread(x_ND, rows), "(n m) d -> n m d", m=size)
    # each device sends the rows of expert 0 first: a row's expert number is the number of experts that end before it
    ends_ne = jnp.cumsum(_swap(counts_ne, axes), axis=1)
    places_nme = jax.lax.broadcasted_iota(jnp.int32, (len(ends_ne), size, experts_per_device), 1)
    experts_nm = (places_nme >= ends_ne[:, None]).sum(2, dtype=jnp.int32)
    x_MD = rearrange(_swap(sent, axes), "n m d -> (n m) d")
    y_MD = _of_rows(x_MD, experts_nm.reshape(-1), weights, activation)
    back = _swap(rearrange(y_MD, "(n m) d -> n m d", m=size), axes)
    return combine(rearrange(back, "n m d -> (n m) d"), choices.weights_Nk.T, rows)


def _swap(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """(n, ...) -> (n, ...): row j goes to device j, and the row that device j sent here replaces it."""
    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)


def _of_rows(x_MD: jax.Array, experts_M: jax.Array, weights: ExpertWeights, activation: Activation) -> jax.Array:
    """The output of each row's expert, 0 for an expert number out of range: (M, D) -> (M, D)."""
    queues = Queues.of(experts_M[None], len(weights.in_EDF))
    rows = Rows.of(queues.order_kN, len(x_MD), full=True)
    return spread(grouped(spread(x_MD, rows), queues, weights, activation, all_rows=False), rows.back)


def grouped(
    x_MD: jax.Array, queues: Queues, weights: ExpertWeights, activation: Activation, *, all_rows: bool
) -> jax.Array:
    """The outputs of rows in the order of `queues`; `all_rows` as in `grouped_matmul`."""

    def affine(x: jax.Array, w: Arrays, b_EF: Sequence[jax.Array | None]) -> Arrays:
        ys = grouped_matmul(x, w, queues.sizes_E, all_rows=all_rows)
        return tuple(y if b is None else _plus_own(y, b, queues.sizes_E) for y, b in zip(ys, b_EF, strict=True))

    return weights.apply(x_MD, affine, activation)


@jax.custom_vjp
def _plus_own(y_MF: jax.Array, b_EF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Rows in the order of `grouped_matmul`, each plus the bias of its expert. Rows after the last expert stay.

    The gradient of the biases is a product with a matrix of ones and zeros: a sum by scatter has no fixed order on a
    GPU.
    """
    return y_MF + b_EF.astype(y_MF.dtype).at[_expert_of_row(len(y_MF), sizes_E)].get(mode="fill", fill_value=0)


def _plus_own_forward(
    y_MF: jax.Array, b_EF: jax.Array, sizes_E: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _plus_own(y_MF, b_EF, sizes_E), (b_EF, sizes_E)


def _plus_own_backward(saved: tuple[jax.Array, jax.Array], dy_MF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    b_EF, sizes_E = saved
    own_ME = jax.nn.one_hot(_expert_of_row(len(dy_MF), sizes_E), len(b_EF), dtype=dy_MF.dtype)
    exact, float32 = jax.lax.Precision.HIGHEST, jnp.float32
    db_EF = jnp.einsum("me,mf->ef", own_ME, dy_MF, precision=exact, preferred_element_type=float32)
    return dy_MF, db_EF.astype(b_EF.dtype), None


_plus_own.defvjp(_plus_own_forward, _plus_own_backward)


def _expert_of_row(rows: int, sizes_E: jax.Array) -> jax.Array:
    """The expert of each row, (M,) int32; E for a row after the last expert's."""
    return (jnp.arange(rows)[:, None] >= jnp.cumsum(sizes_E)[None]).sum(1, dtype=jnp.int32)


def _capacity_rows(queues: Queues, experts_kN: jax.Array, capacity: int) -> Rows:
    """A buffer (E C) with the first `capacity` choices of each expert."""
    size = len(queues.sizes_E) * capacity
    fits = (queues.place_kN < capacity) & (experts_kN < len(queues.sizes_E))
    return Rows.of(jnp.where(fits, experts_kN * capacity + queues.place_kN, size), size)


def _batched_affine(x_ECD: jax.Array, w_EDF: Arrays, b_EF: Sequence[jax.Array | None]) -> Arrays:
    """The products of each expert's rows: (E, C, D), (E, D, F) each -> (E, C, F) each, of x's dtype."""
    ys = (jnp.einsum("ecd,edf->ecf", x_ECD, w, preferred_element_type=x_ECD.dtype) for w in w_EDF)
    return tuple(y if b is None else y + b.astype(y.dtype)[:, None] for y, b in zip(ys, b_EF, strict=True))
