"""The gradient of a step and the loss of an evaluation. A schedule chooses the order in which microbatches and layers
are computed.

Shapes: A microbatches, B sequences of a microbatch over the whole mesh, T positions.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from mesh_transformer.models.head import TokenLoss
from mesh_transformer.models.loops import Aux
from mesh_transformer.models.model import Model, Params
from mesh_transformer.ops.attend import context
from mesh_transformer.parallel.sharding import Partition, constrain_tree

Metrics = dict[str, jax.Array]


class Batch(NamedTuple):
    """The batch of a step, each array (A, B, T); or one microbatch, (B, T).

    The positions are in the order of `Partition.sequence_order`.
    """

    tokens: jax.Array  # int32
    targets: jax.Array  # int32
    weights: jax.Array
    """float32: the weight of each target's loss. All weights sum to A. The sum of weighted losses, divided by A, is
    therefore the weighted mean over all tokens, however they are spread over the microbatches."""

    @classmethod
    def of(cls, tokens_ABT: jax.Array) -> Self:
        """A batch of (A, B, T + 1) or (B, T + 1) int32 tokens, all with the same weight."""
        tokens, targets = tokens_ABT[..., :-1], tokens_ABT[..., 1:]
        order = context.order(tokens.shape[-1])
        if order is not None:
            tokens, targets = tokens[..., order], targets[..., order]
        return cls(tokens, targets, jnp.full(targets.shape, 1 / (targets.shape[-1] * targets.shape[-2])))


class Parts(NamedTuple):
    """The functions that a schedule calls. `model` has the embedding, a layer and the loop over layers."""

    model: Model
    transform: Callable[[Params, Params], Params]
    """The model's parameters from the trained and the frozen ones, all in the compute dtype."""
    loss: Callable[[Params, jax.Array, Aux, Batch], tuple[jax.Array, TokenLoss]]
    """(parameters, residual stream after the last layer, named sums of the layers, batch) -> weighted loss, losses of
    the tokens. The weighted losses of parts of the positions add up to that of all."""
    metrics: Callable[[jax.Array, TokenLoss], Metrics]
    """The results of `loss` for a whole microbatch -> metrics."""
    sums: Partition
    """The partition of the sum of gradients."""
    axes: Params
    """The dimension names of the trained parameters."""

    def constrain(self, gradient: Params) -> Params:
        """A gradient of the trained parameters, sharded as the sum of gradients is."""
        return constrain_tree(gradient, self.sums, self.axes)


class Schedule(NamedTuple):
    """The order in which microbatches and layers are computed."""

    gradients: Callable[[Parts, Params, Params, Batch], tuple[Params, Metrics, jax.Array]]
    """(parts, trained parameters, frozen parameters, batch (A, B, T)) -> the mean gradient in float32, the mean
    metrics, and the squared norm of each microbatch's gradient, (A,). Parameters are in the compute dtype. The loss receives the
    named sums of each layer, and their cotangents flow back to that layer."""
    loss: Callable[[Parts, Params, Batch], tuple[jax.Array, TokenLoss]]
    """(parts, the model's parameters in the compute dtype, batch (B, T)) -> the results of `Parts.loss`."""


def _gradients(parts: Parts, trained: Params, frozen: Params, batch: Batch) -> tuple[Params, Metrics, jax.Array]:
    def loss(trained: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        value, per_token = _loss(parts, parts.transform(trained, frozen), batch)
        return value, parts.metrics(value, per_token)

    def microbatch(total: Params, batch: Batch) -> tuple[Params, tuple[Metrics, jax.Array]]:
        (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(trained, batch)
        gradient = optax.tree.cast(parts.constrain(gradient), jnp.float32)
        square = optax.tree.norm(gradient, squared=True)
        return optax.tree.add(total, gradient), (metrics, square)

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    count = len(batch.tokens)
    if count == 1:
        total, (metrics, square) = microbatch(zeros, Batch(*(x[0] for x in batch)))
        return total, metrics, square[None]
    total, (metrics, squares) = jax.lax.scan(microbatch, zeros, batch)
    return optax.tree.scale(1 / count, total), jax.tree.map(lambda m: m.mean(0), metrics), squares


def _loss(parts: Parts, params: Params, batch: Batch) -> tuple[jax.Array, TokenLoss]:
    x_BTD, _, aux = parts.model.hidden(params, batch.tokens)
    return parts.loss(params, x_BTD, aux, batch)


sequential = Schedule(_gradients, _loss)
"""One microbatch after the other, each through all layers."""
