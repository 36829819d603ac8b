"""Log-likelihoods of continuations: the jitted programs, and a loop that keeps the device busy.

Shapes: B rows, T tokens of a row, N = B * T tokens of a batch, D residual width, P tokens that the head scores, M next
tokens to score at each of them.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from mesh_transformer.infer.scoring.packing import BatchPlan, ScoringBatch
from mesh_transformer.models.head import Normalizer, VocabTiles
from mesh_transformer.models.placement import Placement
from mesh_transformer.ops.attend.packed import PackedView
from mesh_transformer.parallel.sharding import Params, use

Result = tuple[int, float, bool]
"""The index of a query, its log-likelihood in nats, and whether each token of its continuation is the most likely one,
so that greedy sampling would generate it."""


class Scorer:
    """The jitted functions of one model on one mesh. The data axes split the rows and the head's positions.

    Args:
        columns: about how many columns of the vocabulary have logits in memory at a time.
    """

    def __init__(self, placement: Placement, *, columns: int):
        placement = placement.whole_sequences()
        self.model, self.partition = placement.model, placement.partition
        self.multiple = placement.size("batch")
        self._tiles = VocabTiles.of(self.model, self.partition, columns)
        self._head = jax.jit(self._gathered_head)
        self._hidden = jax.jit(self._hidden_ND)
        self._score = jax.jit(self._scores_PM, out_shardings=self.partition.sharding())

    def run(self, params: Params, plan: BatchPlan) -> Iterator[list[Result]]:
        """The results of each batch, while the device computes the next one.

        Args:
            params: parameters in the compute dtype, on the mesh. "blocks" may be a tuple with one tree per layer.
        """
        # gathered once for all chunks of all batches
        head = self._head(params)
        dispatched = ((batch, self._dispatch(params, head, batch, plan.chunk)) for batch in plan.batches)
        # dispatch the next batch before waiting for the results of this one
        for (batch, parts), _ in itertools.pairwise(itertools.chain[Any](dispatched, [None])):
            numbers = map(np.concatenate, zip(*jax.device_get(parts), strict=True))
            yield list(batch.results(*numbers))

    def _dispatch(self, params: Params, head: Params, batch: ScoringBatch, chunk: int) -> list[Any]:
        x_ND = self._hidden(params, batch.tokens_BT, batch.positions_BT, batch.ends_BT)
        parts = [slice(start, start + chunk) for start in range(0, len(batch.at_P), chunk)]
        return [self._score(head, x_ND, batch.at_P[part], batch.targets_PM[part]) for part in parts]

    def _gathered_head(self, params: Params) -> Params:
        with use(self.partition):
            return self._tiles.cut(self.model.gathered_head(params))

    def _hidden_ND(
        self, params: Params, tokens_BT: jax.Array, positions_BT: jax.Array, ends_BT: jax.Array
    ) -> jax.Array:
        """The residual stream after the last block, for all tokens of a batch."""
        model = self.model
        entries = [layer.attention.keys_and_values for layer in model.decoder.layers]
        view = PackedView.of(ends_BT, entries, model.dtype)
        with use(self.partition):
            x_BTD, _ = model.hidden(params, tokens_BT, view, positions_BT=positions_BT)
        return rearrange(x_BTD, "b t d -> (b t) d")

    def _scores_PM(
        self, head: Params, x_ND: jax.Array, at_P: jax.Array, targets_PM: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        with use(self.partition):
            return log_probs(self._tiles, head, x_ND[at_P], targets_PM)


def log_probs(tiles: VocabTiles, head: Params, x_PD: jax.Array, targets_PM: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of next tokens in nats, (P, M) float32, and whether each is the most likely token, (P, M) bool.

    Args:
        head: the result of `VocabTiles.cut`.
        x_PD: the residual stream after the last block.
    """
    tile_PM, column_PM = tiles.place(targets_PM)
    # each tile has a copy of the norm's parameters
    first = jax.tree.map(lambda leaf: leaf[0], head)
    # each position becomes a sequence, so that the data axes split the positions
    y_P1D = tiles.model.final_norm(first, x_PD[:, None])

    def step(carry: Any, tile: Any) -> tuple[Any, None]:
        normalizer, target_PM = carry
        number, params = tile
        logits_PC = tiles.logits(params, number, y_P1D)[:, 0]
        found_PM = jnp.take_along_axis(logits_PC, column_PM, axis=-1)
        return (normalizer.add(logits_PC)[0], jnp.where(tile_PM == number, found_PM, target_PM)), None

    start = Normalizer.empty((len(x_PD),)), jnp.zeros(targets_PM.shape, jnp.float32)
    (normalizer, target_PM), _ = jax.lax.scan(step, start, (jnp.arange(tiles.tiles), head))
    largest_P1, total_P1 = normalizer.largest[:, None], normalizer.total[:, None]
    return target_PM - largest_P1 - jnp.log(total_P1), target_PM == largest_P1
