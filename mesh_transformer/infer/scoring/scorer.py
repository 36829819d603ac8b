"""Log-likelihoods of continuations: the two programs, and the loop that keeps a device busy with them.

Shapes: B rows, T tokens of a row, N all B * T of them, D residual width, P tokens whose logits are wanted, M next tokens
of interest after each.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from mesh_transformer.infer.scoring.packing import Batch, BatchPlan
from mesh_transformer.models.head import Normaliser, VocabTiles
from mesh_transformer.models.model import Params, Placement
from mesh_transformer.parallel.sharding import use

Result = tuple[int, float, bool]
"""A query's number, its log-likelihood in nats, whether no token is likelier than the next one anywhere in its
continuation: greedy sampling would give it."""


class Scorer:
    """The jitted functions of one model on one mesh; rows and the head's positions are split over the data axes.

    Args:
        columns: of the vocabulary, whose logits exist at a time, about.
    """

    def __init__(self, placement: Placement, *, columns: int):
        placement = placement.with_rules(block_seq=None)
        self.model, self.partition = placement.model, placement.partition
        self.multiple = placement.size("batch")
        self._tiles = VocabTiles.of(self.model, self.partition, columns)
        self._head = jax.jit(self._gathered_head)
        self._hidden = jax.jit(self._hidden_ND)
        self._score = jax.jit(self._scores_PM, out_shardings=self.partition.sharding())

    def run(self, params: Params, plan: BatchPlan) -> Iterator[list[Result]]:
        """The results of each batch in turn, while the device computes the next one.

        Args:
            params: in the compute dtype, on the mesh; "blocks" may be a tuple, one tree a layer.
        """
        head = self._head(params)  # once: a batch has many chunks
        dispatched = ((batch, self._dispatch(params, head, batch, plan.chunk)) for batch in plan.batches)
        # the next one is dispatched before the results of this one are waited for
        for (batch, parts), _ in itertools.pairwise(itertools.chain[Any](dispatched, [None])):
            numbers = map(np.concatenate, zip(*jax.device_get(parts), strict=True))
            yield list(batch.results(*numbers))

    def _dispatch(self, params: Params, head: Params, batch: Batch, chunk: int) -> list[Any]:
        x_ND = self._hidden(params, batch.tokens_BT, batch.positions_BT, batch.ends_BT)
        parts = [slice(start, start + chunk) for start in range(0, len(batch.at_P), chunk)]
        return [self._score(head, x_ND, batch.at_P[part], batch.targets_PM[part]) for part in parts]

    def _gathered_head(self, params: Params) -> Params:
        with use(self.partition):
            return self._tiles.cut(self.model.gathered_head(params))

    def _hidden_ND(
        self, params: Params, tokens_BT: jax.Array, positions_BT: jax.Array, ends_BT: jax.Array
    ) -> jax.Array:
        """The residual stream after the last block, of all tokens of a batch."""
        model = self.model
        view = model.packed_view(ends_BT)
        with use(self.partition):
            x_BTD, _, _ = model.hidden(params, tokens_BT, view, positions_BT=positions_BT)
        return rearrange(x_BTD, "b t d -> (b t) d")

    def _scores_PM(
        self, head: Params, x_ND: jax.Array, at_P: jax.Array, targets_PM: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        with use(self.partition):
            return log_probs(self._tiles, head, x_ND[at_P], targets_PM)


def log_probs(
    tiles: VocabTiles, head: Params, x_PD: jax.Array, targets_PM: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities (P, M) of next tokens in nats, float32, and whether no token is likelier.

    Args:
        head: as `VocabTiles.cut` gives it.
        x_PD: the residual stream after the last block.
    """
    tile_PM, column_PM = tiles.place(targets_PM)
    first = jax.tree.map(lambda leaf: leaf[0], head)  # the norm's parameters are in each tile
    y_P1D = tiles.model.final_norm(first, x_PD[:, None])  # positions as sequences: data axes split them

    def step(carry: Any, tile: Any) -> tuple[Any, None]:
        normaliser, target_PM = carry
        number, params = tile
        logits_PC = tiles.logits(params, number, y_P1D)[:, 0]
        found_PM = jnp.take_along_axis(logits_PC, column_PM, axis=-1)
        return (normaliser.add(logits_PC)[0], jnp.where(tile_PM == number, found_PM, target_PM)), None

    start = Normaliser.empty((len(x_PD),)), jnp.zeros(targets_PM.shape, jnp.float32)
    (normaliser, target_PM), _ = jax.lax.scan(step, start, (jnp.arange(tiles.tiles), head))
    largest_P1, total_P1 = normaliser.largest[:, None], normaliser.total[:, None]
    return target_PM - largest_P1 - jnp.log(total_P1), target_PM == largest_P1
