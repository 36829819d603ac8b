"""Pipeline parallelism: the work of a stage in each tick, and the communication between stages.

The devices of the mesh axis that splits the layers are stages. A stage has the consecutive layers of one virtual stage
(1F1B, Narayanan et al. 2019, arXiv:1806.03377), or of `rounds` virtual stages, so that a microbatch goes around the
stages several times (interleaved 1F1B, Narayanan et al. 2021, arXiv:2104.04473): virtual stage c is on stage c mod p,
in round c div p.

Time is in ticks, the same on all stages. In a tick a stage computes one virtual stage forward for one microbatch,
and one backward for another. Nothing branches on the stage: an idle stage computes with values that are not used.

Shapes: B sequences of a microbatch, T positions.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mesh_transformer.parallel.sharding import Function, Partition, Specs, Tree

Index = jax.Array | int
"""A traced number, or a Python int."""


class Item(NamedTuple):
    """The work of a stage in a tick: int32 scalars; `valid` is false for an idle stage."""

    microbatch: jax.Array
    round: jax.Array
    valid: jax.Array


class Ticks(NamedTuple):
    """The ticks of a step with p stages, v rounds and M microbatches.

    Stage s computes item u = t - s forward in tick t, and item t - (p v - 1) - (p - 1 - s) backward. The items are
    ordered by p microbatches, then by round: p microbatches go around before the next p begin.
    """

    stages: int
    rounds: int
    microbatches: int

    def forward(self, tick: Index, stage: Index) -> Item:
        """The forward work of a stage in a tick."""
        return self._item(tick - stage, backward=False)

    def backward(self, tick: Index, stage: Index) -> Item:
        """The backward work of a stage in a tick."""
        return self._item(tick - self.warmup - (self.stages - 1 - stage), backward=True)

    @property
    def warmup(self) -> int:
        """The number of first ticks without a backward pass. As many ticks at the end have no forward pass."""
        return self.stages * self.rounds - 1

    @property
    def forward_ticks(self) -> int:
        """The ticks until the last microbatch has left the last stage."""
        return self._items + self.stages - 1

    @property
    def total(self) -> int:
        """The ticks of a step with its backward pass."""
        return self.forward_ticks + self.warmup

    @property
    def bubble(self) -> float:
        """The share of time in which a stage is idle, if a backward tick takes as long whether or not it runs beside a
        forward tick: (p - 1) / (v M + p - 1)."""
        return (self.stages - 1) / (self.microbatches * self.rounds + self.stages - 1)

    @property
    def slots(self) -> int:
        """The microbatches of a round whose inputs a stage keeps: at most 2 p are between their two passes."""
        return min(2 * self.stages, self.microbatches)

    @property
    def _items(self) -> int:
        if self.rounds == 1:
            return self.microbatches
        return -(-self.microbatches // self.stages) * self.stages * self.rounds

    def _item(self, number: Index, backward: bool) -> Item:
        in_time = (number >= 0) & (number < self._items)
        several, rest = jnp.divmod(jnp.clip(number, 0, self._items - 1), self.stages * self.rounds)
        turn, first = jnp.divmod(rest, self.stages)
        microbatch = several * self.stages + first
        valid = in_time & (microbatch < self.microbatches)
        turn = self.rounds - 1 - turn if backward else turn
        return Item(jnp.minimum(microbatch, self.microbatches - 1), turn, valid)


@dataclasses.dataclass(frozen=True)
class PipelineStages:
    """The stages of a partition, for code inside of `run`.

    For the loss they take equal shares of an array's dimension `place`, which is named `shared`.
    """

    partition: Partition
    count: int
    shared: str = "block_seq"
    place: int = 1

    @property
    def axis(self) -> str:
        """The mesh axis that splits the layers."""
        (axis,) = self.partition.rules["layers"] or ()
        return axis

    @property
    def folded(self) -> P:
        """The split of the result of `fold`."""
        return P(None, self.axis)

    @property
    def index(self) -> jax.Array:
        """This stage."""
        return jax.lax.axis_index(self.axis)

    @property
    def last(self) -> int:
        """The last stage."""
        return self.count - 1

    def run(self, function: Function, in_specs: Specs, out_specs: Specs) -> Function:
        """`function` on each stage; the partitioner splits over the other axes.

        Without `check_vma`: with it, the gradient of everything that the stages share would be summed over them in each
        tick, and every loop of the model would have to name the axis.
        """
        return jax.shard_map(
            function,
            mesh=self.partition.current_mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={self.axis},
            check_vma=False,
        )

    def send(self, x: jax.Array, by: int) -> jax.Array:
        """The array of the stage that is `by` stages before this one, in a ring."""
        return jax.lax.ppermute(x, self.axis, [(i, (i + by) % self.count) for i in range(self.count)])

    def sum(self, tree: Tree) -> Tree:
        """The sum over all stages, float32."""
        return jax.lax.psum(tree, self.axis)

    @property
    def shards(self) -> int:
        """The devices of a stage that split the shared dimension."""
        return self.partition.size(self.shared)

    def share_of_last(self, x: jax.Array) -> jax.Array:
        """This stage's share of the last stage's array: (..., N, ...) -> (..., N / p, ...).

        An all-to-all, not a masked sum: XLA for CPU cannot sum bfloat16 over some axes of a mesh.
        """
        cut = jax.lax.all_to_all(self._cut(x), self.axis, split_axis=self.place + 1, concat_axis=0, tiled=False)
        return self._joined(cut[-1])

    def share(self, x: jax.Array) -> jax.Array:
        """This stage's share of an array that all stages have: (..., N, ...) -> (..., N / p, ...)."""
        return self._joined(jax.lax.dynamic_index_in_dim(self._cut(x), self.index, self.place + 1, keepdims=False))

    def gather(self, x: jax.Array) -> jax.Array:
        """The shares of all stages: (..., N / p, ...) -> (..., N, ...)."""
        return self._joined(jax.lax.all_gather(self._split(x, self.shards), self.axis, axis=self.place + 1, tiled=True))

    def _cut(self, x: jax.Array) -> jax.Array:
        """(..., shards, p, N / shards / p, ...): each device keeps the part that it has."""
        return self._split(x, self.shards, self.count)

    def _split(self, x: jax.Array, *parts: int) -> jax.Array:
        """x with its shared dimension as these parts, outermost first, and the rest."""
        return x.reshape(*x.shape[: self.place], *parts, -1, *x.shape[self.place + 1 :])

    def _joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `_split` into one number of parts."""
        return x.reshape(*x.shape[: self.place], -1, *x.shape[self.place + 2 :])


def fold(stack: Tree, rounds: int) -> Tree:
    """Arrays of all layers by round: (L, ...) -> (v, L / v, ...). The stages split the second dimension."""
    return jax.tree.map(lambda x: x.reshape(rounds, -1, *x.shape[1:]), stack)


def unfold(stack: Tree) -> Tree:
    """The inverse of `fold`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stack)


def at(x: jax.Array, *indices: Index) -> jax.Array:
    """x[indices], without a gather that the partitioner would have to split."""
    for index in indices:
        x = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
    return x


def put(x: jax.Array, value: jax.Array, *indices: Index) -> jax.Array:
    """x with `value` at x[indices], in place."""
    start = (*indices, *[0] * value.ndim)
    return jax.lax.dynamic_update_slice(x, value.reshape((1,) * len(indices) + value.shape), start)
