"""Tensor parallelism: each device has some columns, or rows, of every matrix (Megatron, arXiv:1909.08053).

    python -m examples.tensor_parallelism

The model predicts the next token from the present one with a stack of feed-forward layers. It names the dimensions of
its arrays. The rules split "mlp" and "vocab" over the mesh axis tp, and "batch" over dp: the model does not know that.
XLA adds the sums over the devices of tp.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from examples import common
from mesh_transformer.models import Embedding, HaikuModel, Linear, Norm, NormSpec
from mesh_transformer.ops import column, row
from mesh_transformer.parallel import Partition, constrain, dimension_rules
from mesh_transformer.train import ModelFunctions, Optimizer, gradients

STEPS, MICROBATCHES, ROWS, POSITIONS, VOCABULARY = 10, 1, 8, 16, 64
WIDTH, HIDDEN, LAYERS = 64, 256, 4
MESH = {"dp": 2, "tp": 4}


def embedding(tokens: jax.Array) -> jax.Array:
    """Tokens (B, T + 1) -> (B, T, D)."""
    return Embedding(VOCABULARY, WIDTH, stddev=0.1, name="tokens")(tokens[:, :-1])


def block(x: jax.Array) -> jax.Array:
    """A layer: (B, T, D) -> (B, T, D). `column` multiplies the whole input by a device's columns; `row` multiplies its
    rows, and sums the products over the devices."""
    up = Linear(WIDTH, HIDDEN, ("embed", "mlp"), name="up")
    down = Linear(HIDDEN, WIDTH, ("mlp", "embed"), stddev=0.02, name="down")
    normed = constrain(Norm(NormSpec(), name="norm")(x), "batch", "block_seq", "act_embed")
    (hidden,) = column(normed, [up.w], ["mlp"])
    return x + row([jax.nn.gelu(constrain(hidden, "batch", "seq", "mlp"))], [down.w])


def head(x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """The sum of this microbatch's losses, divided by the number of tokens of a whole one."""
    logits = Linear(WIDTH, VOCABULARY, ("embed", "vocab"), name="logits")(x)
    logits = constrain(logits, "batch", "seq", "vocab")
    # a product, not a lookup: each device has some of the logits
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(tokens[:, 1:], VOCABULARY))
    return losses.sum() / (ROWS * POSITIONS), None


def partition(mesh: Mesh) -> Partition:
    """The rules: which axis of the mesh splits which dimension."""
    return Partition(mesh, dimension_rules())


def train(partition: Partition) -> common.Run:
    """The training step is that of one device."""
    tokens = common.sequences(STEPS, MICROBATCHES, ROWS, POSITIONS, VOCABULARY)
    model = HaikuModel(embedding, block, head, layers=LAYERS, example=jnp.zeros(tokens.shape[2:], jnp.int32))
    parts = ModelFunctions(model.embed, model.layer, model.loss, model.axes)
    optimizer = Optimizer.named("adam", model.axes, **common.ADAM)

    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        gradient, metrics, _ = gradients(parts, params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, metrics["loss"]

    return common.fit(partition, model, optimizer, step, tokens)


if __name__ == "__main__":
    common.main(__spec__.name, train, partition, MESH)
