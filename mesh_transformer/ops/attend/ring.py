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
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.ops.attend import splash
from mesh_transformer.ops.attend.kernel import on_each_device, split_heads
from mesh_transformer.ops.attend.ring_blocks import (
    Backward,
    KeyGradients,
    Keys,
    Plain,
    Queries,
    QueryGradients,
    RingBlocks,
    Softmax,
    Splash,
)
from mesh_transformer.parallel.sharding import MeshAxes, Partition, Specs, Tree

# the chunks of queries, the state that the visits accumulate for them, and the gradients of chunks of keys, if any
_Query = TypeVar("_Query")
_State = TypeVar("_State")
_Gradient = TypeVar("_Gradient")
_Carry = tuple[_State, "list[_Sent]", _Gradient]
Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]
"""q, k, v: (B, T, H, K), (B, T, J, K), (B, T, J, V), positions in the order of `Partition.sequence_order`.
bias: (1, H, T, T) or None; its rows and columns are in the same order. segments: (B, T) int32 or None: a query sees the
keys of its own segment only. window: int32 scalar or None, as in `causal.Attend`."""
_Saved = tuple[Inputs, jax.Array, jax.Array]
"""The inputs, the output, and the logarithm of the softmax's normalizer, (B, J, G, T) float32."""


@dataclasses.dataclass(frozen=True, eq=False)
class RingPlan:
    """The static arguments of an attention."""

    partition: Partition
    # the mesh axis that splits the positions, and its size
    axis: str
    devices: int
    mode: str
    scale: float
    softcap: float | None
    # whether the splash kernel computes the blocks
    splash: bool = False

    def blocks(self, window: jax.Array | None) -> RingBlocks:
        """The implementation of a block."""
        if self.splash:
            return Splash(splash.SplashBlocks.of(self.partition, self.scale, self.softcap))
        return Plain(self.scale, self.softcap, window)

    def map(self, function: Callable[..., Tree], in_specs: Specs, out_specs: Specs) -> Callable[..., Tree]:
        """`function` of the arrays of one device; the partitioner splits all dimensions that the specs leave to it."""
        run, mesh = functools.partial(function, self), self.partition.current_mesh
        if self.splash:
            return on_each_device(self.partition, run, in_specs, out_specs)
        return jax.shard_map(
            run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={self.axis}, check_vma=True
        )

    @property
    def split(self) -> tuple[MeshAxes, MeshAxes]:
        """The axes that split sequences and heads; None if the partitioner splits them."""
        if not self.splash:
            return None, None
        batch, _, heads, _ = split_heads(self.partition)
        return batch, heads

    def empty(self, shape: Sequence[int], value: float = 0.0) -> jax.Array:
        """A float32 array whose values will differ between devices."""
        empty = jnp.full(shape, value, jnp.float32)
        # the `shard_map` of a kernel does not track what differs
        return empty if self.splash else jax.lax.pcast(empty, self.axis, to="varying")

    def empty_like(self, tree: Tree) -> Tree:
        """Zeros of the shapes of a tree, as `empty` makes them."""
        return jax.tree.map(lambda x: self.empty(x.shape), tree)

    def send(self, tree: Tree) -> Tree:
        """The arrays of the previous device of the ring."""
        ring = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, ring), tree)

    def sum_by_position(self, x_NBTJK: jax.Array) -> jax.Array:
        """The sum over devices of arrays of all positions. Each device gets the sum at its positions."""
        free = P.UNCONSTRAINED
        split = NamedSharding(self.partition.current_mesh, P(None, free, self.axis, free, free))
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


class _Sent(NamedTuple):
    """A chunk of keys as it is sent."""

    k_BSJK: jax.Array
    v_BSJK: jax.Array
    segments_BS: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(plan: RingPlan, given: Inputs) -> jax.Array:
    """The output of attention, (B, T, H, V) of q's dtype."""
    return _forward(plan, given)[0]


def _specs(plan: RingPlan) -> tuple[P, ...]:
    """The splits of `Inputs`.

    With gather the partitioner gathers the keys. An `all_gather` inside the `shard_map` would gather the sequences and
    heads that other axes split too.
    """
    batch, heads = plan.split
    rows, ids = P(batch, plan.axis, heads), P(batch, plan.axis)
    if plan.mode == "gather":
        return rows, P(), P(), P(None, None, plan.axis), P(), P()
    return rows, rows, rows, P(None, heads, plan.axis), ids, P()


def _normalizer(plan: RingPlan) -> P:
    """The split of (B, J, G, T)."""
    batch, heads = plan.split
    return P(batch, heads, None, plan.axis)


def _forward(plan: RingPlan, given: Inputs) -> tuple[jax.Array, _Saved]:
    specs = _specs(plan)
    run = plan.map(_forward_of_device, (specs,), (specs[0], _normalizer(plan)))
    # the policies of compute.remat refer to the saved arrays of attention by this name
    mixed, log_z = (checkpoint_name(x, "attn_out") for x in run(given))
    return mixed, (given, mixed, log_z)


def _backward(plan: RingPlan, saved: _Saved, dy_BTHK: jax.Array) -> tuple[tuple[jax.Array | None, ...]]:
    specs = _specs(plan)
    rows, bias = specs[0], specs[3]
    keys = P(plan.axis) if plan.mode == "gather" else rows
    run = plan.map(_backward_of_device, (specs, rows, _normalizer(plan), rows), (rows, keys, keys, bias))
    dq, *dkeys, dbias = run(*saved, dy_BTHK)
    if plan.mode == "gather":
        dkeys = [plan.sum_by_position(x) for x in dkeys]
    dk, dv = (x.astype(dy_BTHK.dtype) for x in dkeys)
    return ((dq, dk, dv, dbias, None, None),)


attend.defvjp(_forward, _backward)


def _forward_of_device(plan: RingPlan, given: Inputs) -> tuple[jax.Array, jax.Array]:
    """The output (B, C, H, V) and the logarithm of the softmax's normalizer, (B, J, G, C) float32."""
    q, k, v, bias, segments, window = given
    queries = _queries(plan, given)
    start = [
        Softmax(plan.empty((*_rows(query), v.shape[-1])), plan.empty(_rows(query), -jnp.inf), plan.empty(_rows(query)))
        for query in queries
    ]

    blocks = plan.blocks(window)

    def block(query: Queries, key: Keys, masked: bool, softmax: Softmax, _: None) -> tuple[Softmax, None]:
        return blocks.forward(query, key, masked, softmax), None

    visit = functools.partial(_visit, plan, block, queries)
    state, _ = _all_visits(plan, visit, start, _keys(plan, k, v, segments), [None] * plan.count)
    mixed = [softmax.numerator_BJGCK / softmax.total_BJGC[..., None] for softmax in state]
    log_z = [softmax.largest_BJGC + jnp.log(softmax.total_BJGC) for softmax in state]
    rows = [rearrange(x, "b j g c k -> b c (j g) k").astype(q.dtype) for x in mixed]
    return jnp.concatenate(rows, axis=1), jnp.concatenate(log_z, axis=3)


def _backward_of_device(
    plan: RingPlan, given: Inputs, mixed: jax.Array, log_z: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The gradients of q, k, v and the bias, as in `ops.attend.causal`, with the softmax from its normalizer.

    The gradients of k and v are float32; with gather, (1, B, T, J, K), and not yet summed over the devices.
    """
    q, k, v, bias, segments, window = given
    queries, j = _queries(plan, given), k.shape[2]
    delta = rearrange((dy.astype(jnp.float32) * mixed.astype(jnp.float32)).sum(-1), "b t (j g) -> b j g t", j=j)
    dys = plan.chunks(rearrange(dy, "b t (j g) k -> b t j g k", j=j), 1)
    outputs = plan.chunks(rearrange(mixed, "b t (j g) k -> b t j g k", j=j) if plan.splash else None, 1)
    kept = zip(dys, plan.chunks(log_z, 3), plan.chunks(delta, 3), outputs, strict=True)
    saved = [Backward(query, *more) for query, more in zip(queries, kept, strict=True)]

    block = plan.blocks(window).backward
    visit, keys = functools.partial(_visit, plan, block, saved), _keys(plan, k, v, segments)
    start = [QueryGradients(*plan.empty_like((query.q_BCJGK, query.bias_BJGCT))) for query in queries]
    none = [KeyGradients(*plan.empty_like((key.k_BSJK, key.v_BSJK))) for key in keys]
    dqueries, dkeys = _all_visits(plan, visit, start, keys, none)
    dq = jnp.concatenate([rearrange(dquery.dq_BCJGK, "b c j g k -> b c (j g) k") for dquery in dqueries], axis=1)
    dk, dv = (jnp.concatenate(parts, axis=1) for parts in zip(*dkeys, strict=True))
    dbias = None
    if bias is not None:
        rows = [
            rearrange(dquery.dbias_BJGCT, "b j g c t -> b (j g) c t")
            for dquery in dqueries
            if dquery.dbias_BJGCT is not None
        ]
        dbias = jnp.concatenate(rows, axis=2).astype(bias.dtype)
    if plan.mode == "gather":
        dk, dv = dk[None], dv[None]
    return dq.astype(q.dtype), dk, dv, dbias


def _queries(plan: RingPlan, given: Inputs) -> list[Queries]:
    """The chunks of a device's queries."""
    q, k, _, bias, segments, _ = given
    device, j = jax.lax.axis_index(plan.axis), k.shape[2]
    q = rearrange(q, "b t (j g) k -> b t j g k", j=j)
    if plan.mode == "gather" and segments is not None:
        segments = jax.lax.dynamic_slice_in_dim(segments, device * q.shape[1], q.shape[1], axis=1)
    bias = None if bias is None else rearrange(bias, "b (j g) t s -> b j g t s", j=j)
    chunks = zip(plan.chunks(q, 1), plan.chunks(segments, 1), plan.chunks(bias, 3), strict=True)
    return [
        Queries(q, plan.positions(device, number, q.shape[1]), segments, bias)
        for number, (q, segments, bias) in enumerate(chunks)
    ]


def _keys(plan: RingPlan, *arrays: jax.Array | None) -> list[_Sent]:
    """The chunks of a device's keys, values and segments."""
    return [_Sent(*chunk) for chunk in zip(*(plan.chunks(x, 1) for x in arrays), strict=True)]


def _rows(query: Queries) -> tuple[int, ...]:
    """The shape (B, J, G, C)."""
    b, c, j, g, _ = query.q_BCJGK.shape
    return b, j, g, c


def _all_visits(
    plan: RingPlan,
    visit: Callable[..., tuple[_State, _Gradient]],
    state: _State,
    keys: list[_Sent],
    gradients: _Gradient,
) -> tuple[_State, _Gradient]:
    """`state` and the gradients of the device's own keys after the keys of all devices were visited.

    `visit(state, device, keys, gradients)` adds the keys of `device` (None: this device) to the state, and returns it
    with the gradients of these keys. What is sent does not depend on the visit, so the compiler may overlap both:
    the next keys before a visit, and the gradients of the last visit.
    """
    this_device, n = jax.lax.axis_index(plan.axis), plan.devices
    if plan.mode == "gather":
        return visit(state, None, keys, gradients)

    def later(carry: _Carry[_State, _Gradient], step: jax.Array) -> tuple[_Carry[_State, _Gradient], None]:
        state, keys, gradients = carry
        following, gradients = plan.send(keys), plan.send(gradients)
        state, gradients = visit(state, (this_device - step) % n, keys, gradients)
        return (state, following, gradients), None

    following = plan.send(keys)
    state, gradients = visit(state, None, keys, gradients)
    # without the barrier the first two visits, which no loop separates, may need memory at the same time
    carry = jax.lax.optimization_barrier((state, following, gradients))
    if n > 2:
        carry, _ = jax.lax.scan(later, carry, jnp.arange(1, n - 1))
    state, keys, gradients = carry
    state, gradients = visit(state, (this_device + 1) % n, keys, plan.send(gradients))
    return state, plan.send(gradients)


def _visit(
    plan: RingPlan,
    block: Callable[[Any, Keys, bool, _State, _Gradient], tuple[_State, _Gradient]],
    queries: list[Any],
    states: list[_State],
    device: jax.Array | None,
    sent: list[_Sent],
    gradients: list[_Gradient],
) -> tuple[list[_State], list[_Gradient]]:
    """Fold the keys of `device` (None: this device) into the softmax of the queries and the gradients of these keys.

    With zigzag, the late queries see all early keys of any device. The early queries see the early keys of an earlier
    device, and the late queries see the late keys of a later device. Both cases are one block, whose inputs are
    selected, so that all devices compute one program. Without zigzag, blocks of the splash kernel, which ignore
    positions, are computed for later devices too, and discarded.
    """
    this_device = jax.lax.axis_index(plan.axis)
    source = this_device if device is None else device
    keys = [_placed(plan, source, number, chunk) for number, chunk in enumerate(sent)]
    states, gradients = list(states), list(gradients)

    def add(row: int, column: int, masked: bool) -> None:
        states[row], gradients[column] = block(queries[row], keys[column], masked, states[row], gradients[column])

    if plan.count == 1 and (device is None or not plan.splash):
        add(0, 0, masked=True)
        return states, gradients
    if plan.count > 1:
        add(1, 0, masked=False)
    if device is None:
        add(0, 0, masked=True)
        add(1, 1, masked=True)
        return states, gradients
    earlier = device < this_device

    def pick(pair: Sequence[Tree]) -> Tree:
        return jax.tree.map(functools.partial(jnp.where, earlier), *pair)

    if plan.count == 1:
        state, gradient = block(queries[0], keys[0], False, states[0], gradients[0])
        return [pick((state, states[0]))], [pick((gradient, gradients[0]))]

    def put(old: Sequence[Tree], new: Tree) -> list[Tree]:
        return [pick((new, old[0])), pick((old[1], new))]

    state, gradient = block(pick(queries), pick(keys), False, pick(states), pick(gradients))
    return put(states, state), put(gradients, gradient)


def _placed(plan: RingPlan, device: jax.Array, number: int, sent: _Sent) -> Keys:
    """A chunk of keys with its positions and its place in the order of `Partition.sequence_order`."""
    size = sent.k_BSJK.shape[1]
    if plan.mode == "gather":
        return Keys(*sent, jnp.arange(size), jnp.zeros((), jnp.int32))
    return Keys(*sent, plan.positions(device, number, size), (plan.count * device + number) * size)
