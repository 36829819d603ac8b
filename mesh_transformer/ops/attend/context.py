"""Attention of whole sequences whose positions are split over devices (context parallelism).

`mesh.context_mode` says how a device reads the keys of other devices:

- ring: keys and values go around a ring of the devices; each visit adds to the softmax (Liu et al. 2023,
  arXiv:2310.01889). A device has consecutive positions, so that half of the blocks are masked.
- zigzag: as ring, and a device has an early and a late chunk of the sequence (`Partition.sequence_order`): every
  device computes two unmasked blocks in each visit.
- gather: each device gathers all keys and values.
- ulysses: the heads are split instead of the positions (Jacobs et al. 2023, arXiv:2309.14509).

All are exact. `ops.attend.ring` computes the first three.

Shapes: B sequences, T positions, H heads, J heads of keys and values, K dims of a head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.ops.attend import kernels
from mesh_transformer.ops.attend.causal import Causal
from mesh_transformer.ops.attend.full import Full
from mesh_transformer.ops.attend.kernel import Windows
from mesh_transformer.parallel.sharding import Partition, active, use


def order(length: int) -> np.ndarray | None:
    """`Partition.sequence_order` of the active partition."""
    partition = active()
    return None if partition is None else partition.sequence_order(length)


@dataclasses.dataclass(frozen=True)
class _Split:
    """The fields of an `Attend` where devices split the positions."""

    view: ClassVar = None
    partition: Partition
    bias_BHTS: jax.Array | None = None
    segments_BT: jax.Array | None = None
    windows: Windows | None = None


class SplitHeads(_Split):
    """An `Attend` that splits the heads over the devices that split heads anyway, and over the devices that elsewhere
    split the positions. The partitioner moves the arrays by all-to-all."""

    def __call__(
        self,
        q_BTHK: jax.Array,
        k_BTJK: jax.Array,
        v_BTJV: jax.Array,
        *,
        scale: float,
        window: jax.Array | int | None = None,
        softcap: float | None = None,
    ) -> jax.Array:
        """See `Attend`. Heads of keys are repeated until each device has whole ones."""
        rules = self.partition.rules
        split = self.partition.with_rules(seq=None, heads=(*(rules["heads"] or ()), *(rules["seq"] or ())))

        def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, split.sharding(*axes))

        def send(x: jax.Array) -> jax.Array:
            # Without the first constraint the partitioner splits the heads of an earlier array too: of keys before they
            # are repeated, for which it gathers all positions, and of the halves of a rotation, in float32.
            x = jax.lax.with_sharding_constraint(x, self.partition.sharding("batch", "seq", "heads", None))
            return constrain(x, "batch", "seq", "heads", None)

        times = math.lcm(k_BTJK.shape[2], split.size("heads")) // k_BTJK.shape[2]
        if times > 1:
            k_BTJK, v_BTJV = (jnp.repeat(x, times, axis=2) for x in (k_BTJK, v_BTJV))
        q_BTHK, k_BTJK, v_BTJV = map(send, (q_BTHK, k_BTJK, v_BTJV))
        bias = None if self.bias_BHTS is None else constrain(self.bias_BHTS, None, "heads", "seq", None)
        causal = Causal(bias, self.segments_BT, self.windows)
        with use(split):
            mixed = causal(q_BTHK, k_BTJK, v_BTJV, scale=scale, window=window, softcap=softcap)
        return constrain(mixed, "batch", "seq", "heads", None)


class SplitPositions(_Split):
    """An `Attend` whose queries stay where they are: keys and values travel, or are gathered."""

    def __call__(
        self,
        q_BTHK: jax.Array,
        k_BTJK: jax.Array,
        v_BTJV: jax.Array,
        *,
        scale: float,
        window: jax.Array | int | None = None,
        softcap: float | None = None,
    ) -> jax.Array:
        """See `Attend`."""
        # imported here: serving does not use it
        from mesh_transformer.ops.attend.ring import RingPlan, attend

        partition, mode, devices = self.partition, self.partition.context_mode, self.partition.size("seq")
        (axis,) = partition.rules["seq"] or ()
        length = q_BTHK.shape[1] // devices // (2 if mode == "zigzag" else 1)
        arrays = q_BTHK, v_BTJV, self.bias_BHTS, self.segments_BT
        case = kernels.case_of(partition, length, *arrays, window, self.windows, softcap, mode)
        fused = kernels.choose(partition.attention, case) == "splash"
        if fused:
            partition, k_BTJK, v_BTJV = kernels.divided(partition, k_BTJK, v_BTJV)
        plan = RingPlan(partition, axis, devices, mode, scale, softcap, fused)
        window = None if window is None else jnp.asarray(window, jnp.int32)
        return attend(plan, (q_BTHK, k_BTJK, v_BTJV, self.bias_BHTS, self.segments_BT, window))


Whole = Causal | Full | SplitHeads | SplitPositions
"""The kinds of an `Attend` of whole sequences."""


def attention(
    bias_BHTS: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    windows: Windows | None = None,
    *,
    causal: bool = True,
) -> Whole:
    """The attention of whole sequences to themselves, for the active partition.

    Args:
        bias_BHTS: B is 1. Rows and columns are in the order of the partition's positions.
        segments_BT: int32: a query sees the keys of its own segment only; None for one segment.
        windows: the possible values of a traced window, so that a kernel can compute each; None if unknown.
        causal: a query sees no later key; False: it sees all keys, and no kernel computes it.
    """
    if not causal:
        return Full(bias_BHTS, segments_BT)
    partition = active()
    if partition is None or partition.size("seq") == 1:
        return Causal(bias_BHTS, segments_BT, windows)
    kind = SplitHeads if partition.context_mode == "ulysses" else SplitPositions
    return kind(partition, bias_BHTS, segments_BT, windows)
