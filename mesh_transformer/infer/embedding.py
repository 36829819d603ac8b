"""The states of texts after the last norm of a model. Shapes: B sequences, T tokens, D residual width."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from mesh_transformer.models.placement import Placement
from mesh_transformer.parallel.sharding import Params, use

# the shortest padded text
_LEAST_TOKENS = 16


class Embedder:
    """The jitted function that computes states, one text at a time.

    Args:
        placement: of an engine.
    """

    def __init__(self, placement: Placement):
        self._model, self._partition = placement.model, placement.partition
        # the multiple of sequences that the mesh splits
        self._rows = placement.size("batch")
        self._states = jax.jit(self._states_BTD, out_shardings=self._partition.sharding())

    def states(self, params: Params, tokens: Sequence[int]) -> np.ndarray:
        """The state of each token, (T, D) float32, with the engine's parameters."""
        # a few lengths are compiled; causal attention does not see the padding
        length = max(_LEAST_TOKENS, 1 << (len(tokens) - 1).bit_length())
        tokens_BT = np.zeros((self._rows, min(length, self._model.decoder.seq)), np.int32)
        tokens_BT[:, : len(tokens)] = tokens
        states_BTD = self._states(params, tokens_BT)
        return np.asarray(states_BTD, np.float32)[0, : len(tokens)]

    def _states_BTD(self, params: Params, tokens_BT: jax.Array) -> jax.Array:
        with use(self._partition):
            x_BTD, _ = self._model.hidden(params, tokens_BT)
            return self._model.final_norm(self._model.gathered_head(params), x_BTD)
