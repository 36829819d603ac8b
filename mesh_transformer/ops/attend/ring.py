"""Attention to keys and values of other devices, which go around a ring of the devices or are gathered.

Each visit of keys adds to the softmax of the queries. The backward pass has queries, keys, values, output and the
softmax's normalizer. It computes the softmax again: keys and values travel once more, and their gradients with them.

Shapes: B sequences, T positions, H heads, J heads of keys and values, G = H / J queries that share keys, K dims of a
head, V dims of a head of values. Of one device: C query positions and S key positions of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.ops.attend.causal import MASKED, sees, soft_capped
from mesh_transformer.parallel.sharding import Specs, Tree

# of chunks of queries: the chunks, and what the visits add up; of chunks of keys: their gradients, if any
_Query = TypeVar("_Query")
_State = TypeVar("_State")
_Gradient = TypeVar("_Gradient")
_Gradients = tuple["_QueryGradients", "_KeyGradients"]
_Carry = tuple[_State, "list[_Sent]", _Gradient]
Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]
"""q, k, v: (B, T, H, K), (B, T, J, K), (B, T, J, V), positions in the order of `Partition.sequence_order`.
bias: (1, H, T, T) or None; its rows and columns are in the same order. segments: (B, T) int32 or None: a query sees the
keys of its own segment only. window: int32 scalar or None, as in `causal.Attend`."""
_Saved = tuple[Inputs, jax.Array, jax.Array]
"""The inputs, the output, and the logarithm of the softmax's normalizer, (B, J, G, T) float32."""


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What is known before the arrays."""

    mesh: Mesh | AbstractMesh
    # the mesh axis that splits the positions, and its size
    axis: str
    devices: int
    mode: str
    scale: float
    softcap: float | None

    def map(self, function: Callable[..., Tree], in_specs: Specs, out_specs: Specs) -> Callable[..., Tree]:
        """`function` of the arrays of one device; the partitioner splits all other dimensions."""
        run = functools.partial(function, self)
        return jax.shard_map(
            run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names={self.axis}, check_vma=True
        )

    def empty(self, shape: Sequence[int], value: float = 0.0) -> jax.Array:
        """A float32 array that differs between devices later."""
        return jax.lax.pcast(jnp.full(shape, value, jnp.float32), self.axis, to="varying")

    def empty_like(self, tree: Tree) -> Tree:
        """Such arrays, zeros, of the shapes of a tree."""
        return jax.tree.map(lambda x: self.empty(x.shape), tree)

    def send(self, tree: Tree) -> Tree:
        """The arrays of the previous device of the ring."""
        ring = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, ring), tree)

    def sum_by_position(self, x_NBTJK: jax.Array) -> jax.Array:
        """The sum over devices of arrays of all positions. Each device sends the others their positions."""
        free = P.UNCONSTRAINED
        split = NamedSharding(self.mesh, P(None, free, self.axis, free, free))
        return jax.lax.with_sharding_constraint(x_NBTJK, split).sum(0)

    def chunks(self, x: jax.Array | None, dimension: int) -> list[Any]:
        """The chunks of an array of one device, earliest first: with zigzag two, else one."""
        return [None] * self.count if x is None else jnp.split(x, self.count, axis=dimension)

    @property
    def count(self) -> int:
        """The number of chunks of a device."""
        return 2 if self.mode == "zigzag" else 1

    def positions(self, device: jax.Array, chunk: int, size: int) -> jax.Array:
        """The positions of a chunk of a device, (size,) int32."""
        number = 2 * self.devices - 1 - device if chunk else device
        return number * size + jnp.arange(size)


class _Queries(NamedTuple):
    """A chunk of queries."""

    q_BCJGK: jax.Array
    positions_C: jax.Array
    segments_BC: jax.Array | None
    # all columns
    bias_BJGCT: jax.Array | None


class _Backward(NamedTuple):
    """A chunk of queries, the gradient of their output, and what the forward pass kept of them."""

    query: _Queries
    dy_BCJGK: jax.Array
    log_z_BJGC: jax.Array
    # the sum over K of output and gradient
    delta_BJGC: jax.Array


class _Sent(NamedTuple):
    """A chunk of keys as it is sent."""

    k_BSJK: jax.Array
    v_BSJK: jax.Array
    segments_BS: jax.Array | None


class _Keys(NamedTuple):
    """A chunk of keys whose device is known."""

    k_BSJK: jax.Array
    v_BSJK: jax.Array
    segments_BS: jax.Array | None
    positions_S: jax.Array
    # the first column of the bias
    column: jax.Array


class _Softmax(NamedTuple):
    """The softmax of a chunk of queries over the keys so far, float32."""

    numerator_BJGCK: jax.Array
    largest_BJGC: jax.Array
    total_BJGC: jax.Array


class _QueryGradients(NamedTuple):
    dq_BCJGK: jax.Array
    dbias_BJGCT: jax.Array | None


class _KeyGradients(NamedTuple):
    dk_BSJK: jax.Array
    dv_BSJK: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(plan: Plan, given: Inputs) -> jax.Array:
    """The output of attention, (B, T, H, V) of q's dtype."""
    return _forward(plan, given)[0]


def _specs(plan: Plan) -> tuple[P, ...]:
    """The splits of `Inputs`.

    With gather the partitioner gathers the keys. An `all_gather` inside the `shard_map` would gather the sequences and
    heads that other axes split too.
    """
    rows = P(None, plan.axis)
    keys = P() if plan.mode == "gather" else rows
    return rows, keys, keys, P(None, None, plan.axis), keys, P()


def _forward(plan: Plan, given: Inputs) -> tuple[jax.Array, _Saved]:
    run = plan.map(_forward_of_device, (_specs(plan),), (P(None, plan.axis), P(None, None, None, plan.axis)))
    # the policies of compute.remat know what is kept of attention by this name
    mixed, log_z = (checkpoint_name(x, "attn_out") for x in run(given))
    return mixed, (given, mixed, log_z)


def _backward(plan: Plan, saved: _Saved, dy_BTHK: jax.Array) -> tuple[tuple[jax.Array | None, ...]]:
    specs = _specs(plan)
    rows, bias = P(None, plan.axis), specs[3]
    keys = P(plan.axis) if plan.mode == "gather" else rows
    run = plan.map(_backward_of_device, (specs, rows, P(None, None, None, plan.axis), rows), (rows, keys, keys, bias))
    dq, *dkeys, dbias = run(*saved, dy_BTHK)
    if plan.mode == "gather":
        dkeys = [plan.sum_by_position(x) for x in dkeys]
    dk, dv = (x.astype(dy_BTHK.dtype) for x in dkeys)
    return ((dq, dk, dv, dbias, None, None),)


attend.defvjp(_forward, _backward)


def _forward_of_device(plan: Plan, given: Inputs) -> tuple[jax.Array, jax.Array]:
    """The output (B, C, H, V) and the logarithm of the softmax's normalizer, (B, J, G, C) float32."""
    q, k, v, bias, segments, window = given
    queries = _queries(plan, given)
    start = [
        _Softmax(plan.empty((*_rows(one), v.shape[-1])), plan.empty(_rows(one), -jnp.inf), plan.empty(_rows(one)))
        for one in queries
    ]

    def block(query: _Queries, key: _Keys, masked: bool, softmax: _Softmax, _: None) -> tuple[_Softmax, None]:
        logits = _logits(query, key, _products(plan, query, key), masked, window)
        largest = jnp.maximum(softmax.largest_BJGC, logits.max(-1))
        exps, rescale = jnp.exp(logits - largest[..., None]), jnp.exp(softmax.largest_BJGC - largest)
        mixed = _product("bjgcs,bsjk->bjgck", exps.astype(key.v_BSJK.dtype), key.v_BSJK)
        numerator = softmax.numerator_BJGCK * rescale[..., None] + mixed
        return _Softmax(numerator, largest, softmax.total_BJGC * rescale + exps.sum(-1)), None

    visit = functools.partial(_visit, plan, block, queries)
    state, _ = _all_visits(plan, visit, start, _keys(plan, k, v, segments), [None] * plan.count)
    mixed = [one.numerator_BJGCK / one.total_BJGC[..., None] for one in state]
    log_z = [one.largest_BJGC + jnp.log(one.total_BJGC) for one in state]
    rows = [rearrange(x, "b j g c k -> b c (j g) k").astype(q.dtype) for x in mixed]
    return jnp.concatenate(rows, axis=1), jnp.concatenate(log_z, axis=3)


def _backward_of_device(
    plan: Plan, given: Inputs, mixed: jax.Array, log_z: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The gradients of q, k, v and the bias, as in `ops.attend.causal`, with the softmax from its normalizer.

    The gradients of k and v are float32; with gather, (1, B, T, J, K), and not yet summed over the devices.
    """
    q, k, v, bias, segments, window = given
    queries, j = _queries(plan, given), k.shape[2]
    delta = rearrange((dy.astype(jnp.float32) * mixed.astype(jnp.float32)).sum(-1), "b t (j g) -> b j g t", j=j)
    dys = plan.chunks(rearrange(dy, "b t (j g) k -> b t j g k", j=j), 1)
    kept = zip(dys, plan.chunks(log_z, 3), plan.chunks(delta, 3), strict=True)
    saved = [_Backward(query, *more) for query, more in zip(queries, kept, strict=True)]

    def block(rows: _Backward, key: _Keys, masked: bool, dquery: _QueryGradients, dkey: _KeyGradients) -> _Gradients:
        query = rows.query
        products = _products(plan, query, key)
        logits = _logits(query, key, products, masked, window)
        weights = jnp.exp(logits - rows.log_z_BJGC[..., None])
        dweights = _product("bcjgk,bsjk->bjgcs", rows.dy_BCJGK, key.v_BSJK)
        dlogits = weights * (dweights - rows.delta_BJGC[..., None])
        dbias = _add_columns(dquery.dbias_BJGCT, key.column, dlogits)
        if plan.softcap is not None:
            dlogits = dlogits * (1 - jnp.square(products / plan.softcap))
        dlogits = (dlogits / np.float32(1 / plan.scale)).astype(q.dtype)
        dq = dquery.dq_BCJGK + _product("bjgcs,bsjk->bcjgk", dlogits, key.k_BSJK)
        dk = dkey.dk_BSJK + _product("bjgcs,bcjgk->bsjk", dlogits, query.q_BCJGK)
        dv = dkey.dv_BSJK + _product("bjgcs,bcjgk->bsjk", weights.astype(q.dtype), rows.dy_BCJGK)
        return _QueryGradients(dq, dbias), _KeyGradients(dk, dv)

    visit, keys = functools.partial(_visit, plan, block, saved), _keys(plan, k, v, segments)
    start = [_QueryGradients(*plan.empty_like((one.q_BCJGK, one.bias_BJGCT))) for one in queries]
    none = [_KeyGradients(*plan.empty_like((one.k_BSJK, one.v_BSJK))) for one in keys]
    dqueries, dkeys = _all_visits(plan, visit, start, keys, none)
    dq = jnp.concatenate([rearrange(one.dq_BCJGK, "b c j g k -> b c (j g) k") for one in dqueries], axis=1)
    dk, dv = (jnp.concatenate(parts, axis=1) for parts in zip(*dkeys, strict=True))
    dbias = None
    if bias is not None:
        rows = [
            rearrange(one.dbias_BJGCT, "b j g c t -> b (j g) c t") for one in dqueries if one.dbias_BJGCT is not None
        ]
        dbias = jnp.concatenate(rows, axis=2).astype(bias.dtype)
    if plan.mode == "gather":
        dk, dv = dk[None], dv[None]
    return dq.astype(q.dtype), dk, dv, dbias


def _queries(plan: Plan, given: Inputs) -> list[_Queries]:
    """The chunks of a device's queries."""
    q, k, _, bias, segments, _ = given
    device, j = jax.lax.axis_index(plan.axis), k.shape[2]
    q = rearrange(q, "b t (j g) k -> b t j g k", j=j)
    if plan.mode == "gather" and segments is not None:
        segments = jax.lax.dynamic_slice_in_dim(segments, device * q.shape[1], q.shape[1], axis=1)
    bias = None if bias is None else rearrange(bias, "b (j g) t s -> b j g t s", j=j)
    chunks = zip(plan.chunks(q, 1), plan.chunks(segments, 1), plan.chunks(bias, 3), strict=True)
    return [
        _Queries(q, plan.positions(device, number, q.shape[1]), segments, bias)
        for number, (q, segments, bias) in enumerate(chunks)
    ]


def _keys(plan: Plan, *arrays: jax.Array | None) -> list[_Sent]:
    """The chunks of a device's keys, values and segments."""
    return [_Sent(*chunk) for chunk in zip(*(plan.chunks(x, 1) for x in arrays), strict=True)]


def _rows(query: _Queries) -> tuple[int, ...]:
    """The shape (B, J, G, C)."""
    b, c, j, g, _ = query.q_BCJGK.shape
    return b, j, g, c


def _all_visits(
    plan: Plan, visit: Callable[..., tuple[_State, _Gradient]], state: _State, keys: list[_Sent], gradients: _Gradient
) -> tuple[_State, _Gradient]:
    """`state` and the gradients of the device's own keys after the keys of all devices were visited.

    `visit(state, device, keys, gradients)` adds the keys of `device`, None for the own ones, to the state, and returns
    it with the gradients of these keys. What is sent does not depend on the visit, so that both overlap: the next keys
    before a visit, and the gradients of the last visit.
    """
    own, n = jax.lax.axis_index(plan.axis), plan.devices
    if plan.mode == "gather":
        return visit(state, None, keys, gradients)

    def later(carry: _Carry[_State, _Gradient], step: jax.Array) -> tuple[_Carry[_State, _Gradient], None]:
        state, keys, gradients = carry
        following, gradients = plan.send(keys), plan.send(gradients)
        state, gradients = visit(state, (own - step) % n, keys, gradients)
        return (state, following, gradients), None

    following = plan.send(keys)
    state, gradients = visit(state, None, keys, gradients)
    # without the barrier the first two visits, which no loop separates, may need memory at the same time
    carry = jax.lax.optimization_barrier((state, following, gradients))
    if n > 2:
        carry, _ = jax.lax.scan(later, carry, jnp.arange(1, n - 1))
    state, keys, gradients = carry
    state, gradients = visit(state, (own + 1) % n, keys, plan.send(gradients))
    return state, plan.send(gradients)


def _visit(
    plan: Plan,
    block: Callable[[Any, _Keys, bool, _State, _Gradient], tuple[_State, _Gradient]],
    queries: list[Any],
    states: list[_State],
    device: jax.Array | None,
    sent: list[_Sent],
    gradients: list[_Gradient],
) -> tuple[list[_State], list[_Gradient]]:
    """Fold the keys of `device` (None: this device) into the softmax of the queries and the gradients of these keys.

    With zigzag, the late queries see all early keys of any device. The early queries see the early keys of an earlier
    device, and the late queries see the late keys of a later device. Both cases are one block, whose inputs are
    selected, so that all devices compute one program.
    """
    own = jax.lax.axis_index(plan.axis)
    keys = [_placed(plan, own if device is None else device, number, one) for number, one in enumerate(sent)]
    states, gradients = list(states), list(gradients)

    def add(row: int, column: int, masked: bool) -> None:
        states[row], gradients[column] = block(queries[row], keys[column], masked, states[row], gradients[column])

    if plan.count == 1:
        add(0, 0, masked=True)
        return states, gradients
    add(1, 0, masked=False)
    if device is None:
        add(0, 0, masked=True)
        add(1, 1, masked=True)
        return states, gradients
    earlier = device < own

    def pick(pair: Sequence[Tree]) -> Tree:
        return jax.tree.map(functools.partial(jnp.where, earlier), *pair)

    def put(old: Sequence[Tree], new: Tree) -> list[Tree]:
        return [pick((new, old[0])), pick((old[1], new))]

    state, gradient = block(pick(queries), pick(keys), False, pick(states), pick(gradients))
    return put(states, state), put(gradients, gradient)


def _placed(plan: Plan, device: jax.Array, number: int, sent: _Sent) -> _Keys:
    """A chunk of keys with its positions and its place in the order of `Partition.sequence_order`."""
    size = sent.k_BSJK.shape[1]
    if plan.mode == "gather":
        return _Keys(*sent, jnp.arange(size), jnp.zeros((), jnp.int32))
    return _Keys(*sent, plan.positions(device, number, size), (plan.count * device + number) * size)


def _product(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


def _products(plan: Plan, query: _Queries, key: _Keys) -> jax.Array:
    """scale q k, with the soft cap, (B, J, G, C, S) float32."""
    # a division, as in `attention_logits`
    products = _product("bcjgk,bsjk->bjgcs", query.q_BCJGK, key.k_BSJK) / np.float32(1 / plan.scale)
    return products if plan.softcap is None else soft_capped(products, plan.softcap)


def _logits(query: _Queries, key: _Keys, products: jax.Array, masked: bool, window: jax.Array | None) -> jax.Array:
    """The products with the bias, where a query sees a key. Without `masked`, it sees all of its window and segment."""
    if query.bias_BJGCT is not None:
        size = key.k_BSJK.shape[1]
        products = products + jax.lax.dynamic_slice_in_dim(query.bias_BJGCT, key.column, size, 4).astype(jnp.float32)
    if masked or window is not None:
        seen = sees(query.positions_C[None], key.positions_S[None], window)[:, None, None]
        products = jnp.where(seen, products, MASKED)
    if query.segments_BC is not None and key.segments_BS is not None:
        same = (query.segments_BC[:, :, None] == key.segments_BS[:, None])[:, None, None]
        products = jnp.where(same, products, MASKED)
    return products


def _add_columns(total_BJGCT: jax.Array | None, column: jax.Array, dlogits_BJGCS: jax.Array) -> jax.Array | None:
    """The bias's gradient plus the sum over sequences of `dlogits`, whose first column is `column`."""
    if total_BJGCT is None:
        return None
    old = jax.lax.dynamic_slice_in_dim(total_BJGCT, column, dlogits_BJGCS.shape[4], 4)
    new = old + dlogits_BJGCS.sum(0, keepdims=True)
    return jax.lax.dynamic_update_slice_in_dim(total_BJGCT, new, column, 4)
