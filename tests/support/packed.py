"""Rows of several documents, and the loss of each document alone in a row: computed by the model without any code of
packing, and in float64 from its logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.models.model import Model
from mesh_transformer.ops.experts import Dispatch
from mesh_transformer.parallel.sharding import Params, use
from mesh_transformer.sequences import Sequences
from mesh_transformer.train.batch import Batch
from mesh_transformer.train.step import TrainProgram

MICROBATCHES, ROWS, LENGTH = 2, 4, 40
# one token, which has no target; and parts of windows, of chunks of zigzag and of rows
_LENGTHS = (1, 2, 3, 5, 9, 14, 22, 41)


def packed(sources: int, seed: int = 0) -> Sequences:
    """A step of rows of LENGTH + 1 tokens with documents and padding. Of each microbatch and row another share of the
    tokens is learned."""
    rng = np.random.default_rng(seed)
    shape = MICROBATCHES, ROWS, LENGTH + 1
    documents = np.zeros(shape, np.int32)
    for row in documents.reshape(-1, LENGTH + 1):
        start, number = 0, 1
        # up to four tokens of padding
        while start < LENGTH + 1 - number % 5:
            length = min(int(rng.choice(_LENGTHS)), LENGTH + 1 - start)
            row[start : start + length] = number
            start, number = start + length, number + 1
    # one row is nearly all padding
    documents[1, 2, 7:] = 0
    tokens = rng.integers(1, 500, shape).astype(np.int32)
    shares = np.linspace(0.05, 0.9, MICROBATCHES * ROWS).reshape(MICROBATCHES, ROWS, 1)
    return Sequences(
        tokens, documents, rng.random(shape) < shares, rng.integers(0, sources, shape[:2]).astype(np.int32)
    )


def targets_of_documents(documents: np.ndarray) -> np.ndarray:
    """Whether a target is in the document of the token before it, bool (..., T), by a loop over the tokens."""
    flat = documents.reshape(-1, documents.shape[-1])
    found = [[before == after != 0 for before, after in zip(row, row[1:], strict=False)] for row in flat.tolist()]
    return np.array(found).reshape(*documents.shape[:-1], -1)


def alone(model: Model, params: Params, given: Sequences, weights: np.ndarray) -> tuple[np.ndarray, Params]:
    """The loss of each target in a row that has its document only, float64, 0 where a target is of no document; and the
    gradient of their sum by these `weights`, all (..., T). Each document is computed by the model on one device."""
    places, rows, row_weights = [], [], []
    for index in np.ndindex(given.tokens.shape[:-1]):
        for number in range(1, int(given.documents[index].max()) + 1):
            (at,) = np.nonzero(given.documents[index] == number)
            if len(at) < 2:
                continue
            row, own = np.zeros(LENGTH + 1, np.int32), np.zeros(LENGTH, np.float32)
            row[: len(at)] = given.tokens[index][at]
            own[: len(at) - 1] = weights[index][at[:-1]]
            places.append((index, at[:-1]))
            rows.append(row)
            row_weights.append(own)

    def loss(params: Params, rows: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, _ = model.apply(params, rows[:, :-1])
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], axis=-1)[..., 0]
        return (nll * weights).sum(), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(params, np.stack(rows), np.stack(row_weights))
    logits = np.asarray(logits, np.float64)
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    nll = log_z - np.take_along_axis(logits, np.stack(rows)[:, 1:, None], axis=-1)[..., 0]
    found = np.zeros(weights.shape)
    for (index, at), losses in zip(places, nll, strict=True):
        found[index][at] = losses[: len(at)]
    return found, jax.device_get(gradient)


def token_losses(run: TrainProgram, params: Params, given: Sequences) -> np.ndarray:
    """The losses of the targets of one microbatch, float32 (B, T), by the program's evaluation."""

    def losses(params: Params, given: Sequences) -> jax.Array:
        with use(run.partition):
            parts = run._parts(lambda losses: losses.nll, Dispatch())
            return run.schedule.loss(parts, run.placement.cast(params), Batch.of(given))[1].losses.nll

    found = jax.jit(losses)(jax.device_put(params, run.placement.shardings), given)
    order: Any = run.partition.sequence_order(LENGTH)
    return np.asarray(found if order is None else found[:, np.argsort(order)])
