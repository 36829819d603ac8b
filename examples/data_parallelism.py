"""Data parallelism: each device has all weights and some rows of the batch; the gradients are summed (all-reduce).

    python -m examples.data_parallelism

With ZeRO-1 (arXiv:1910.02054) the devices also share out the sum of gradients and the optimizer state: each updates its
part of the weights, and they gather the new weights. The model is a regression in plain Haiku: `with_axes` names the
dimensions of each parameter.
"""

from typing import Any

import haiku as hk
import jax
import numpy as np
import optax
from jax.sharding import Mesh

from examples import common
from mesh_transformer.models import HaikuModel
from mesh_transformer.parallel import Partition, constrain, constrain_tree, dimension_rules, with_axes
from mesh_transformer.train import ModelFunctions, Optimizer, gradients

STEPS, MICROBATCHES, ROWS, FEATURES = 10, 2, 64, 24
WIDTH, LAYERS = 64, 3
MESH = {"dp": 8}


def linear(width: int, axes: tuple[str | None, str | None], name: str) -> hk.Linear:
    """Haiku's own layer with names for the dimensions of its weights and biases."""
    weights = hk.initializers.VarianceScaling(1.0, "fan_in", "truncated_normal")
    return hk.Linear(
        width, w_init=with_axes(weights, *axes), b_init=with_axes(hk.initializers.Constant(0.0), axes[1]), name=name
    )


def embedding(batch: dict[str, jax.Array]) -> jax.Array:
    """Features (B, F) -> (B, D)."""
    return linear(WIDTH, (None, "embed"), "features")(batch["features"])


def block(x: jax.Array) -> jax.Array:
    """A layer: (B, D) -> (B, D)."""
    return constrain(x + jax.nn.tanh(linear(WIDTH, ("embed", None), "dense")(x)), "batch", "act_embed")


def head(x: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    """The sum of the squared errors of these rows, divided by the rows of a microbatch."""
    error = linear(1, ("embed", None), "value")(x)[:, 0] - batch["values"]
    return (error**2).sum() / ROWS, None


def data() -> dict[str, np.ndarray]:
    """Rows of features, and a value that is not linear in them."""
    features = np.random.default_rng(0).standard_normal((STEPS, MICROBATCHES, ROWS, FEATURES)).astype(np.float32)
    return {"features": features, "values": np.sin(features[..., 0]) + features[..., 1]}


def partition(mesh: Mesh) -> Partition:
    """The rules: "batch" is split over dp."""
    return Partition(mesh, dimension_rules())


def train(partition: Partition) -> common.Run:
    """`sums` and the optimizer state have the partition `zero1`, which splits "embed" over dp; the weights do not."""
    batches = data()
    model = HaikuModel(embedding, block, head, layers=LAYERS, example=jax.tree.map(lambda x: x[0, 0], batches))
    names = ("batch", "act_embed")
    parts = ModelFunctions(model.embed, model.layer, model.loss, model.axes, sums=partition.zero1, stream_axes=names)
    optimizer = Optimizer.named("adam", model.axes, **common.ADAM)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        gradient, metrics, _ = gradients(parts, params, batch)
        updates, state = optimizer.update(gradient, state, params)
        updates = constrain_tree(updates, partition, model.axes)
        return optax.apply_updates(params, updates), state, metrics["loss"]

    return common.fit(partition, model, optimizer, step, batches, slots=partition.zero1)


if __name__ == "__main__":
    common.main(__spec__.name, train, partition, MESH)
