"""A vision transformer (ViT, arXiv:2010.11929): an encoder of image patches, on dp x tp.

    python -m examples.vision

An encoder differs from a decoder in three places. A linear map of patches replaces the table of tokens, and each patch
has a learned row and a learned column. Attention has no causal mask. The head reads the mean over all positions. The
parallelism is that of examples/context_parallelism.py.

The images are made here: digits of seven segments, at several places and sizes, of several brightnesses, and with
noise. The accuracy is measured on images that were not trained on.
"""

from typing import Any

import jax
import jax.numpy as jnp
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
    OutputBias,
    columns,
)
from mesh_transformer.ops import attention, row
from mesh_transformer.parallel import Partition, constrain, dimension_rules
from mesh_transformer.train import ModelFunctions, Optimizer, gradients, jit, loss

STEPS, COMPARED, MICROBATCHES, ROWS, HELD_OUT = 100, 10, 1, 64, 512
SIDE, PATCH, CLASSES = 16, 4, 10
WIDTH, HEADS, HIDDEN, LAYERS = 64, 4, 128, 2
ADAM = {**common.ADAM, "end_lr": 5e-4, "warmup_steps": 10, "anneal_steps": 90}
MESH = {"dp": 2, "tp": 4}


def embedding(batch: dict[str, jax.Array]) -> jax.Array:
    """Images (B, 16, 16) -> 4 x 4 patches (B, 16, D)."""
    n = SIDE // PATCH
    pixels = batch["images"].reshape(-1, n, PATCH, n, PATCH).swapaxes(2, 3)
    patches = pixels.reshape(-1, n * n, PATCH * PATCH)
    places = jnp.broadcast_to(jnp.arange(n * n), patches.shape[:2])
    x = Linear(PATCH**2, WIDTH, ("pixels", "embed"), bias=True, name="patches")(patches)
    x = x + Embedding(n, WIDTH, stddev=0.3, name="rows")(places // n)
    return x + Embedding(n, WIDTH, stddev=0.3, name="columns")(places % n)


def block(x: jax.Array) -> jax.Array:
    """Attention of all patches to all patches, then a feed-forward network: (B, T, D) -> (B, T, D)."""
    heads = AttentionSpec(heads=HEADS, kv_heads=HEADS, head_dim=WIDTH // HEADS, positions=None)
    mix = Attention(heads, WIDTH, 0.02, name="attention")
    queries, keys, values = columns(norm(x, "norm"), mix.inputs)
    mixed = mix(queries, keys, values, Context(attention(causal=False), positions=None))
    x = x + OutputBias("o_bias")(row([mixed], [mix.out.w]))
    up = Linear(WIDTH, HIDDEN, ("embed", "mlp"), bias=True, name="up")
    down = Linear(HIDDEN, WIDTH, ("mlp", "embed"), stddev=0.02, name="down")
    (hidden,) = columns(norm(x, "ff_norm"), [up])
    hidden = jax.nn.gelu(constrain(hidden, "batch", "seq", "mlp"), approximate=False)
    return x + OutputBias("down_bias")(row([hidden], [down.w]))


def norm(x: jax.Array, name: str) -> jax.Array:
    """(B, T, D) -> (B, T, D)."""
    return constrain(Norm(NormSpec(), name=name)(x), "batch", "block_seq", "act_embed")


def head(x: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    """The sum of the losses of these images, divided by the images of a microbatch; and which of them are right."""
    logits = Linear(WIDTH, CLASSES, ("embed", None), bias=True, name="logits")(norm(x, "norm").mean(1))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.sum() / ROWS, logits.argmax(-1) == batch["labels"]


def partition(mesh: Mesh) -> Partition:
    """The rules. "pixels" is a dimension of this model, and no device splits it."""
    return Partition(mesh, dimension_rules(pixels=None))


def train(partition: Partition) -> common.Run:
    """The stages of a pipeline share out "batch" for the loss, because it needs all positions of an image."""
    random = np.random.default_rng(0)
    steps = [common.digits(MICROBATCHES * ROWS, SIDE, random) for _ in range(STEPS)]
    batches = jax.tree.map(lambda *x: np.stack(x).reshape(STEPS, MICROBATCHES, ROWS, *x[0].shape[1:]), *steps)
    held_out = common.digits(HELD_OUT, SIDE, random)
    model = HaikuModel(embedding, block, head, layers=LAYERS, example=jax.tree.map(lambda x: x[0, 0], batches))
    parts = ModelFunctions(model.embed, model.layer, model.loss, model.axes, shared_out="batch")
    optimizer = Optimizer.named("adam", model.axes, **ADAM)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        gradient, metrics, _ = gradients(parts, params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, metrics["loss"]

    run = common.fit(partition, model, optimizer, step, batches, compared=COMPARED)
    _, right = jit(partition, lambda params, batch: loss(parts, params, batch))(run.trained, held_out)
    return run._replace(results={"accuracy on held-out images": float(right.mean())})


if __name__ == "__main__":
    common.main(__spec__.name, train, partition, MESH)
