"""Pipeline parallelism of a classifier: each stage has consecutive layers, and microbatches go from stage to stage.

    python -m examples.pipeline_parallelism              # pp 4 x dp 2
    python -m examples.pipeline_parallelism dp=2 tp=4    # the same classifier, with split matrices instead

The classifier is no decoder: it is plain Haiku, its rows are images, and its loss is that of a whole image. The stages
compute in the order 1F1B (arXiv:1806.03377) and send activations, and their gradients, by permutes. When the last stage
has finished a microbatch, each stage takes an equal share of its rows through the head.
"""

from typing import Any

import haiku as hk
import jax
import numpy as np
import optax
from jax.sharding import Mesh

from examples import common
from mesh_transformer.models import HaikuModel
from mesh_transformer.parallel import Partition, constrain, dimension_rules, with_axes
from mesh_transformer.train import ModelFunctions, Optimizer, gradients

STEPS, MICROBATCHES, ROWS, PIXELS, CLASSES = 10, 8, 16, 8 * 8, 8
WIDTH, HIDDEN, LAYERS = 32, 64, 8
MESH = {"pp": 4, "dp": 2}


def linear(width: int, axes: tuple[str | None, str | None], name: str) -> hk.Linear:
    """Haiku's own layer with names for the dimensions of its weights and biases."""
    weights = hk.initializers.VarianceScaling(0.5, "fan_in", "truncated_normal")
    return hk.Linear(
        width, w_init=with_axes(weights, *axes), b_init=with_axes(hk.initializers.Constant(0.0), axes[1]), name=name
    )


def embedding(batch: dict[str, jax.Array]) -> jax.Array:
    """Images (B, pixels) -> (B, D)."""
    return linear(WIDTH, ("pixels", "embed"), "pixels")(batch["images"])


def block(x: jax.Array) -> jax.Array:
    """A residual layer: (B, D) -> (B, D). With tp, XLA splits the products, because the names split the matrices."""
    ones, zeros = hk.initializers.Constant(1.0), hk.initializers.Constant(0.0)
    norm = hk.LayerNorm(-1, True, True, scale_init=with_axes(ones, "embed"), offset_init=with_axes(zeros, "embed"))
    hidden = jax.nn.relu(linear(HIDDEN, ("embed", "mlp"), "up")(norm(x)))
    hidden = constrain(hidden, "batch", "mlp")
    return constrain(x + linear(WIDTH, ("mlp", "embed"), "down")(hidden), "batch", "act_embed")


def head(x: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    """The sum of the losses of these images, divided by the number of images of a whole microbatch."""
    logits = linear(CLASSES, ("embed", None), "logits")(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.sum() / ROWS, losses


def data() -> dict[str, np.ndarray]:
    """Images of eight patterns with noise."""
    random = np.random.default_rng(0)
    patterns = random.standard_normal((CLASSES, PIXELS))
    labels = random.integers(0, CLASSES, (STEPS, MICROBATCHES, ROWS))
    images = patterns[labels] + random.standard_normal((*labels.shape, PIXELS))
    return {"images": images.astype(np.float32), "labels": labels.astype(np.int32)}


def partition(mesh: Mesh) -> Partition:
    """The rules: "layers" is split over pp. "pixels" is a dimension of this model, and no device splits it."""
    return Partition(mesh, dimension_rules(pixels=None))


def train(partition: Partition) -> common.Run:
    """The stages share out "batch" for the loss, because an image has no positions."""
    batches = data()
    model = HaikuModel(embedding, block, head, layers=LAYERS, example=jax.tree.map(lambda x: x[0, 0], batches))
    names = ("batch", "act_embed")
    parts = ModelFunctions(model.embed, model.layer, model.loss, model.axes, stream_axes=names, shared_out="batch")
    optimizer = Optimizer.named("adam", model.axes, **common.ADAM)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        gradient, metrics, _ = gradients(parts, params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, metrics["loss"]

    return common.fit(partition, model, optimizer, step, batches)


if __name__ == "__main__":
    common.main(__spec__.name, train, partition, MESH)
