"""Log-likelihoods of continuations: the two programs, and the loop that keeps a device busy with them.

Shapes: B rows, T tokens of a row, N all B * T of them, D residual width, P tokens whose logits are wanted, M next tokens
of interest after each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from mesh_transformer.infer.packing import Batch, Plan
from mesh_transformer.models.base import Model, Params
from mesh_transformer.ops.packing import PackedView
from mesh_transformer.parallel.sharding import Partition, use

Result = tuple[int, float, bool]
"""A query's number, its log-likelihood in nats, whether no token is likelier than the next one anywhere in its
continuation: greedy sampling would give it."""


class Scorer:
    """The jitted functions of one model on one mesh; rows and the head's positions are split over the data axes."""

    def __init__(self, model: Model, partition: Partition):
        self.model, self.partition = model, partition.with_rules(block_seq=None)
        self.multiple = partition.mesh.shape["dp"] * partition.mesh.shape["fsdp"]
        self._head = jax.jit(self._gathered_head)
        self._hidden = jax.jit(self._hidden_ND)
        # A program of its own: XLA for CPU would compute the bias again for each of the passes below, a third slower.
        self._logits = jax.jit(self._logits_PV)
        self._score = jax.jit(_scores, out_shardings=partition.sharding())

    def run(self, params: Params, plan: Plan) -> Iterator[list[Result]]:
        """The results of each batch in turn, while the device computes the next one.

        Args:
            params: in the compute dtype, on the mesh; "blocks" may be a tuple, one tree a layer.
        """
        head = self._head(params)  # once: a batch has many chunks
        waiting: tuple[Batch, list[Any]] | None = None
        for batch in plan.batches:
            dispatched = batch, self._dispatch(params, head, batch, plan.chunk)
            if waiting is not None:
                yield _results(*waiting)
            waiting = dispatched
        if waiting is not None:
            yield _results(*waiting)

    def _dispatch(self, params: Params, head: Params, batch: Batch, chunk: int) -> list[Any]:
        x_ND = self._hidden(params, batch.tokens_BT, batch.positions_BT, batch.ends_BT)
        parts = [slice(start, start + chunk) for start in range(0, len(batch.at_P), chunk)]
        return [
            self._score(self._logits(head, x_ND, batch.at_P[part]), batch.targets_PM[part]) for part in parts
        ]

    def _gathered_head(self, params: Params) -> Params:
        with use(self.partition):
            return self.model.gathered_head(params)

    def _hidden_ND(
        self, params: Params, tokens_BT: jax.Array, positions_BT: jax.Array, ends_BT: jax.Array
    ) -> jax.Array:
        """The residual stream after the last block, of all tokens of a batch."""
        model = self.model
        view = PackedView.of(ends_BT, model.config.n_heads, model.config.d_head, model.dtype)
        with use(self.partition):
            x_BTD, _ = model.hidden(params, tokens_BT, view, positions_BT=positions_BT)
        return rearrange(x_BTD, "b t d -> (b t) d")

    def _logits_PV(self, head: Params, x_ND: jax.Array, at_P: jax.Array) -> jax.Array:
        with use(self.partition):
            x_P1D = x_ND[at_P][:, None]  # the positions are the batch: each data-parallel replica has some
            return self.model.logits(head, x_P1D)[:, 0]


def _scores(logits_PV: jax.Array, targets_PM: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities (P, M) of next tokens, float32, and whether no token is likelier."""
    largest_P1 = logits_PV.max(-1, keepdims=True)
    log_z_P1 = jnp.log(jnp.exp(logits_PV - largest_P1).sum(-1, keepdims=True))
    logit_PM = jnp.take_along_axis(logits_PV, targets_PM, axis=-1)
    return logit_PM - largest_P1 - log_z_P1, logit_PM == largest_P1


def _results(batch: Batch, dispatched: list[Any]) -> list[Result]:
    return list(batch.results(*map(np.concatenate, zip(*jax.device_get(dispatched), strict=True))))
