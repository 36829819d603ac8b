"""Context parallelism: each device has some positions of every sequence, and keys and values go around a ring.

    python -m examples.context_parallelism

A transformer of one's own. Only attention needs the positions of other devices: `attention()` is the kernel that the
partition needs. With "zigzag" (ring attention, arXiv:2310.01889) a device has an early and a late part of the sequence,
so that causal attention is the same work for each. The batch is put into this order once.
"""

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from examples import common
from mesh_transformer.models import (
    Attention,
    AttentionSpec,
    Context,
    Embedding,
    HaikuModel,
    Linear,
    Norm,
    NormSpec,
    columns,
)
from mesh_transformer.ops import attention, row
from mesh_transformer.parallel import Partition, constrain, dimension_rules
from mesh_transformer.train import ModelFunctions, Optimizer, gradients

STEPS, MICROBATCHES, ROWS, POSITIONS, VOCABULARY = 10, 2, 8, 32, 32
WIDTH, HEADS, HIDDEN, LAYERS = 64, 4, 128, 2
MESH = {"dp": 4, "cp": 2}


def embedding(batch: dict[str, jax.Array]) -> jax.Array:
    """Tokens and their positions in the sequence (B, T) -> (B, T, D)."""
    tokens = Embedding(VOCABULARY, WIDTH, stddev=0.1, name="tokens")(batch["tokens"])
    return tokens + Embedding(POSITIONS, WIDTH, stddev=0.1, name="positions")(batch["positions"])


def block(x: jax.Array) -> jax.Array:
    """Attention, then a feed-forward network: (B, T, D) -> (B, T, D)."""
    heads = AttentionSpec(heads=HEADS, kv_heads=HEADS, head_dim=WIDTH // HEADS, positions=None)
    mix = Attention(heads, WIDTH, 0.02, name="attention")
    queries, keys, values = columns(norm(x, "norm"), mix.inputs)
    x = x + row([mix(queries, keys, values, Context(attention(), positions=None))], [mix.out.w])
    up = Linear(WIDTH, HIDDEN, ("embed", "mlp"), name="up")
    down = Linear(HIDDEN, WIDTH, ("mlp", "embed"), stddev=0.02, name="down")
    (hidden,) = columns(norm(x, "ff_norm"), [up])
    return x + row([jax.nn.gelu(constrain(hidden, "batch", "seq", "mlp"))], [down.w])


def norm(x: jax.Array, name: str) -> jax.Array:
    """(B, T, D) -> (B, T, D)."""
    return constrain(Norm(NormSpec(), name=name)(x), "batch", "block_seq", "act_embed")


def head(x: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    """The sum of the losses of these positions, divided by the number of tokens of a microbatch."""
    logits = Linear(WIDTH, VOCABULARY, ("embed", "vocab"), name="logits")(x)
    # a product, not a lookup: with tp each device has some of the logits
    right = jax.nn.one_hot(batch["targets"], VOCABULARY)
    losses = optax.softmax_cross_entropy(constrain(logits, "batch", "seq", "vocab"), right)
    return losses.sum() / (ROWS * POSITIONS), None


def data(partition: Partition) -> dict[str, np.ndarray]:
    """Sequences with one of three strides, in the order in which the devices hold their positions."""
    tokens = common.sequences(STEPS, MICROBATCHES, ROWS, POSITIONS, VOCABULARY, strides=3)
    positions = np.broadcast_to(np.arange(POSITIONS, dtype=np.int32), tokens[..., 1:].shape)
    batches = {"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "positions": positions}
    order = partition.sequence_order(POSITIONS)
    return batches if order is None else {name: x[..., order] for name, x in batches.items()}


def partition(mesh: Mesh) -> Partition:
    """The rules: "seq" and "block_seq" are split over cp."""
    return Partition(mesh, dimension_rules(), context_mode="zigzag")


def train(partition: Partition) -> common.Run:
    """The training step is that of one device."""
    batches = data(partition)
    model = HaikuModel(embedding, block, head, layers=LAYERS, example=jax.tree.map(lambda x: x[0, 0], batches))
    parts = ModelFunctions(model.embed, model.layer, model.loss, model.axes)
    optimizer = Optimizer.named("adam", model.axes, **common.ADAM)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        gradient, metrics, _ = gradients(parts, params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, metrics["loss"]

    return common.fit(partition, model, optimizer, step, batches)


if __name__ == "__main__":
    common.main(__spec__.name, train, partition, MESH)
