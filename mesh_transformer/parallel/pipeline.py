"""Pipeline parallelism: what a stage computes in each tick, and what the stages send to each other.

The devices of the mesh axis that splits the layers are stages. A stage has one group of consecutive layers (1F1B,
Narayanan et al. 2019, arXiv:1806.03377), or `rounds` of them, so that a microbatch goes around the stages several times
(interleaved 1F1B, Narayanan et al. 2021, arXiv:2104.04473): group c of the layers is on stage c mod p, in round c div
p.

Time is in ticks, the same on all stages. In a tick a stage computes one group forward for one microbatch, and one group
backward for another. Nothing branches on the stage: an idle stage computes with values that are not used.

Shapes: B sequences of a microbatch, T positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mesh_transformer.parallel.sharding import Partition


class Item(NamedTuple):
    """What a stage computes in a tick: int32 scalars, and whether there is anything to compute."""

    microbatch: Any
    round: Any
    valid: Any


class Ticks(NamedTuple):
    """The ticks of a step with p stages, v rounds and M microbatches.

    Stage s computes item u = t - s forward in tick t, and item t - (p v - 1) - (p - 1 - s) backward. The items are
    ordered by p microbatches, then by round: p microbatches go around before the next p begin.
    """

    stages: int
    rounds: int
    microbatches: int

    def forward(self, tick: Any, stage: Any) -> Item:
        """What a stage computes forward in a tick."""
        return self._item(tick - stage, backward=False)

    def backward(self, tick: Any, stage: Any) -> Item:
        """What a stage computes backward in a tick."""
        return self._item(tick - self.warmup - (self.stages - 1 - stage), backward=True)

    @property
    def warmup(self) -> int:
        """The first ticks, which compute nothing backward; as many ticks at the end compute nothing forward."""
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
        """The microbatches of a round whose inputs a stage keeps. 2 p: no more are between their two passes."""
        return min(2 * self.stages, self.microbatches)

    @property
    def _items(self) -> int:
        if self.rounds == 1:
            return self.microbatches
        return -(-self.microbatches // self.stages) * self.stages * self.rounds

    def _item(self, number: Any, backward: bool) -> Item:
        in_time = (number >= 0) & (number < self._items)
        several, rest = jnp.divmod(jnp.clip(number, 0, self._items - 1), self.stages * self.rounds)
        turn, first = jnp.divmod(rest, self.stages)
        microbatch = several * self.stages + first
        valid = in_time & (microbatch < self.microbatches)
        turn = self.rounds - 1 - turn if backward else turn
        return Item(jnp.minimum(microbatch, self.microbatches - 1), turn, valid)


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a partition, for code inside of `run`."""

    partition: Partition
    count: int

    @property
    def axis(self) -> str:
        """The mesh axis that splits the layers."""
        (axis,) = self.partition.rules["layers"] or ()
        return axis

    @property
    def folded(self) -> P:
        """The split of what `fold` returns."""
        return P(None, self.axis)

    @property
    def index(self) -> jax.Array:
        """This stage."""
        return jax.lax.axis_index(self.axis)

    @property
    def last(self) -> int:
        """The last stage."""
        return self.count - 1

    def run(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
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

    def sum(self, tree: Any) -> Any:
        """The sum over all stages, float32."""
        return jax.lax.psum(tree, self.axis)

    def share_of_last(self, x_BT: jax.Array) -> jax.Array:
        """This stage's share of the positions of the last stage's array: (B, T, ...) -> (B, T / p, ...).

        An all-to-all, not a masked sum: XLA for CPU cannot sum bfloat16 over some axes of a mesh.
        """
        return self._joined(
            jax.lax.all_to_all(self._cut(x_BT), self.axis, split_axis=2, concat_axis=0, tiled=False)[-1]
        )

    def share(self, x_BT: jax.Array) -> jax.Array:
        """This stage's share of the positions of an array that all stages have: (B, T, ...) -> (B, T / p, ...)."""
        return self._joined(jax.lax.dynamic_index_in_dim(self._cut(x_BT), self.index, 2, keepdims=False))

    def gather(self, x_BT: jax.Array) -> jax.Array:
        """The positions of all stages' shares: (B, T / p, ...) -> (B, T, ...)."""
        b, t, *rest = x_BT.shape
        shards = self.partition.size("block_seq")
        gathered = jax.lax.all_gather(x_BT.reshape(b, shards, t // shards, *rest), self.axis, axis=2, tiled=True)
        return gathered.reshape(b, t * self.count, *rest)

    def _cut(self, x_BT: jax.Array) -> jax.Array:
        """(B, shards of the positions, p, rest, ...): each device keeps the positions that it has."""
        b, t, *rest = x_BT.shape
        shards = self.partition.size("block_seq")
        return x_BT.reshape(b, shards, self.count, t // shards // self.count, *rest)

    def _joined(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def fold(stack: Any, rounds: int) -> Any:
    """Arrays of all layers by round: (L, ...) -> (v, L / v, ...). The stages split the second dimension."""
    return jax.tree.map(lambda x: x.reshape(rounds, -1, *x.shape[1:]), stack)


def unfold(stack: Any) -> Any:
    """The inverse of `fold`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stack)
