"""Fully sharded data parallelism: the devices share out rows, weights and optimizer state (ZeRO-3, arXiv:1910.02054).

    python -m examples.fsdp

The mesh axis fsdp splits "batch", and the dimension "embed" of each parameter: a device keeps an eighth of the weights
and of Adam's moments. `HaikuModel` gathers the weights of one layer just before their use (`gather_weights`), and sums
and scatters their gradients at once. So no device ever has the weights of two layers, and the model does not know it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from examples import common
from mesh_transformer.models import Embedding, HaikuModel, Linear, Norm, NormSpec
from mesh_transformer.parallel import Partition, constrain, dimension_rules
from mesh_transformer.train import ModelFunctions, Optimizer, gradients

STEPS, MICROBATCHES, ROWS, POSITIONS, VOCABULARY = 10, 2, 8, 16, 64
WIDTH, HIDDEN, LAYERS = 64, 128, 4
MESH = {"fsdp": 8}


def embedding(tokens: jax.Array) -> jax.Array:
    """Tokens (B, T + 1) -> (B, T, D)."""
    return Embedding(VOCABULARY, WIDTH, stddev=0.1, name="tokens")(tokens[:, :-1])


def block(x: jax.Array) -> jax.Array:
    """A layer, a gated feed-forward network: (B, T, D) -> (B, T, D)."""
    normed = Norm(NormSpec(kind="rms", offset=False), name="norm")(x)
    gate = Linear(WIDTH, HIDDEN, ("embed", "mlp"), name="gate")(normed)
    up = Linear(WIDTH, HIDDEN, ("embed", "mlp"), name="up")(normed)
    x = x + Linear(HIDDEN, WIDTH, ("mlp", "embed"), stddev=0.02, name="down")(jax.nn.silu(gate) * up)
    return constrain(x, "batch", "block_seq", "act_embed")


def head(x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """The sum of this microbatch's losses, divided by the number of tokens of a whole one."""
    logits = Linear(WIDTH, VOCABULARY, ("embed", "vocab"), name="logits")(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.sum() / (ROWS * POSITIONS), None


def partition(mesh: Mesh) -> Partition:
    """The rules, such as embed = ("fsdp",) and batch = ("dp", "fsdp")."""
    return Partition(mesh, dimension_rules())


def train(partition: Partition) -> common.Run:
    """Each step sums the gradients of two microbatches, in the layout of the weights."""
    tokens = common.sequences(STEPS, MICROBATCHES, ROWS, POSITIONS, VOCABULARY)
    model = HaikuModel(embedding, block, head, layers=LAYERS, example=jnp.zeros(tokens.shape[2:], jnp.int32))
    # `kept`: the backward pass computes each layer again, and gathers its weights again
    parts = ModelFunctions(model.embed, model.layer, model.loss, model.axes, kept=())
    optimizer = Optimizer.named("adam", model.axes, **common.ADAM)

    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        gradient, metrics, _ = gradients(parts, params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, metrics["loss"]

    return common.fit(partition, model, optimizer, step, tokens)


if __name__ == "__main__":
    common.main(__spec__.name, train, partition, MESH)
