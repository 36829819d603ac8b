"""The gradient of a step and the loss of an evaluation, of any model that is given as `ModelFunctions`. A schedule
chooses the order in which microbatches and layers are computed.

Shapes: A microbatches, B sequences of a microbatch over the whole mesh, T positions, D width, L layers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from mesh_transformer.models.stack import (
    LAYER_LOOP,
    Batch,
    Kind,
    LayerFunction,
    LayerGroups,
    Means,
    Outputs,
    Results,
    Rows,
    Stream,
    over_layers,
)
from mesh_transformer.parallel.replicas import Replicas
from mesh_transformer.parallel.sharding import Axes, Block, Params, Partition, Tree, active, constrain, constrain_tree
from mesh_transformer.spec import LayerGroup

Metrics = dict[str, Any]
"""Numbers of a step by name: scalars, or dictionaries of them."""


def side_by_side(trained: Params, frozen: Params) -> Params:
    """The parameters from two parts that have no parameter in common."""
    return merged(frozen, trained)


def picked(tree: Tree, like: object) -> Tree:
    """The leaves of a tree of dictionaries and lists that have the names of leaves of `like`."""
    if isinstance(like, Mapping) and isinstance(tree, Mapping):
        return cast(Tree, {name: picked(tree[name], part) for name, part in like.items()})
    if isinstance(like, list) and isinstance(tree, list):
        return cast(Tree, [picked(*pair) for pair in zip(tree, like, strict=True)])
    return tree


def merged(tree: Tree, part: object) -> Tree:
    """A tree of dictionaries and lists with the leaves of `part`, which has some of its names or others."""
    if isinstance(part, Mapping) and isinstance(tree, Mapping):
        leaves = {name: merged(tree[name], leaf) if name in tree else leaf for name, leaf in part.items()}
        return cast(Tree, {**tree, **leaves})
    if isinstance(part, list) and isinstance(tree, list):
        return cast(Tree, [merged(*pair) for pair in zip(tree, part, strict=True)])
    return cast(Tree, part)


def only_loss(loss: jax.Array, results: Results, means: Means) -> Metrics:
    """The loss as the only metric."""
    return {"loss": loss}


class ModelFunctions(NamedTuple):
    """A model as functions and data. All parameters are in the dtype of the arithmetic.

    A batch is an array, or a tree of arrays, whose first dimensions are A and B; one microbatch begins with B.
    """

    embed: Callable[[Params, Batch], Stream]
    """(parameters of "embed", microbatch) -> what the first layer reads."""
    layer: Callable[[Block, Stream, Rows], tuple[jax.Array, Means]]
    """(parameters of one layer, its input, its row of `numbers`) -> x for the next layer, named means over its tokens.
    A kind in `layer_groups` may replace this function."""
    loss: Callable[[Params, jax.Array, Batch], tuple[jax.Array, Results]]
    """(parameters, x after the last layer, microbatch) -> a float32 scalar, and results for `metrics`: arrays
    (B, T, ...). For a pipeline: the scalars of pieces of a microbatch, cut along `shared_out`, add up to its scalar."""
    axes: Params
    """The dimension names of the trained parameters."""
    transform: Callable[[Params, Params], Params] = side_by_side
    """The parameters from the trained and the frozen ones."""
    layer_loss: Callable[[Means], jax.Array] | None = None
    """The named means of one layer -> a float32 scalar, which the gradient includes beside `loss`, if given."""
    metrics: Callable[[jax.Array, Results, Means], Metrics] = only_loss
    """(scalar of `loss`, without `layer_loss`; its results; the means of the layers, (layers that have them, ...)), all
    of a whole microbatch -> metrics."""
    sums: Partition | None = None
    """The partition of the sum of gradients, by default the active one."""
    layer_groups: LayerGroups | None = None
    """The layers by their kinds, in order, by default one group of equal layers. With several groups, the names of the
    modules of "blocks" begin with the number of the group (`spec.in_group`). One group is split over the stages of a
    pipeline (`spec.pipelined_group`), and each stage computes the other groups whole."""
    numbers: Rows = None
    """Arrays (L, ...) without gradients, or None. Each layer reads its own row."""
    kept: Sequence[str] | None = None
    """The names (`jax.ad_checkpoint.checkpoint_name`) of the activations of a layer that the backward pass keeps,
    beside its input, by default all activations. The stages of a pipeline keep the input only."""
    unroll: int = 1
    """Layers in one pass of the loop."""
    tied: bool = False
    """Whether `loss` reads the parameters of "embed"."""
    stream_axes: Axes = ("batch", "block_seq", "act_embed")
    """The dimension names of x between layers."""
    shared_out: str = "block_seq"
    """The dimension that the stages of a pipeline divide among themselves to compute the loss, a name of `stream_axes`.
    Every array of a batch has it at the place that it has there."""

    def layout(self, blocks: Block) -> LayerGroups:
        """`layer_groups`, given the parameters "blocks"; one group if there are none."""
        return self.layer_groups or (LayerGroup((Kind(None),), len(jax.tree.leaves(blocks)[0])),)

    def layer_of(self, kind: Kind) -> Callable[[Block, Stream, Rows], tuple[jax.Array, Means]]:
        """The function that computes the layers of a kind."""
        return kind.layer or self.layer

    def loss_of_layer(self, means: Means) -> jax.Array:
        """`layer_loss` of one layer; 0 if there is none."""
        return jnp.zeros(()) if self.layer_loss is None or not means else self.layer_loss(means)

    def loss_of_layers(self, means: Means) -> jax.Array:
        """The sum of `layer_loss` over layers, given their means, stacked."""
        return jax.vmap(self.loss_of_layer)(means).sum() if means else jnp.zeros(())

    def constrain(self, gradient: Params) -> Params:
        """A gradient of the trained parameters, sharded as the sum of gradients is."""
        sums = self.sums or active()
        return gradient if sums is None else constrain_tree(gradient, sums, self.axes)


class StepSchedule(NamedTuple):
    """The order in which microbatches and layers are computed."""

    gradients: Callable[[ModelFunctions, Params, Params, Batch], tuple[Params, Metrics, jax.Array | None]]
    """(parts, trained parameters, frozen parameters, batch (A, B, ...)) -> the mean gradient in float32, the mean
    metrics, and the squared norm of the gradient of each microbatch, (A,), or of equal parts of each; None if it is
    not computed."""
    loss: Callable[[ModelFunctions, Params, Batch], tuple[jax.Array, Results, Means]]
    """(parts, parameters, batch (B, ...)) -> the results of `ModelFunctions.loss`, and the means of the layers."""


def microbatches(batch: Batch) -> int:
    """A."""
    return len(jax.tree.leaves(batch)[0])


def _gradients(
    parts: ModelFunctions, trained: Params, frozen: Params, batch: Batch
) -> tuple[Params, Metrics, jax.Array]:
    def loss(trained: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        value, results, means = _loss(parts, parts.transform(trained, frozen), batch)
        metrics = parts.metrics(value, results, means)
        return value + parts.loss_of_layers(means) if means else value, metrics

    def microbatch(total: Params, batch: Batch) -> tuple[Params, tuple[Metrics, jax.Array]]:
        (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(trained, batch)
        # each layer's gradient is summed over the devices already, mostly by the partitioner, in the compute dtype
        gradient = optax.tree.cast(parts.constrain(gradient), jnp.float32)
        square = optax.tree.norm(gradient, squared=True)
        return optax.tree.add(total, gradient), (metrics, square)

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    count = microbatches(batch)
    if count == 1:
        total, (metrics, square) = microbatch(zeros, jax.tree.map(lambda x: x[0], batch))
        return total, metrics, square[None]
    total, (metrics, squares) = jax.lax.scan(microbatch, zeros, batch)
    return optax.tree.scale(1 / count, total), jax.tree.map(lambda m: m.mean(0), metrics), squares


def _loss(parts: ModelFunctions, params: Params, batch: Batch) -> tuple[jax.Array, Results, Means]:
    stream, blocks = parts.embed(params["embed"], batch), params["blocks"]
    with jax.named_scope(LAYER_LOOP):
        layer, groups = rematerialized(parts, stream, parts.kept), parts.layout(blocks)
        x_BTD, (_, means) = over_layers(groups, layer, stream.x_BTD, blocks, parts.numbers, unroll=parts.unroll)
    return *parts.loss(params, constrain(x_BTD, *parts.stream_axes), batch), means


sequential = StepSchedule(_gradients, _loss)
"""One microbatch after the other, each through all layers."""


def rematerialized(parts: ModelFunctions, stream: Stream, kept: Sequence[str] | None) -> LayerFunction[jax.Array]:
    """The layers of a loop over x. Their backward pass keeps the activations `kept` (`ModelFunctions.kept`) and
    recomputes the rest.

    Gathered weights are never kept: they would take the memory that fsdp saves. A gather is a sharding constraint
    (`gather_weights`).
    """

    def layer(kind: Kind, x_BTD: jax.Array, block: Block, row: Rows) -> tuple[jax.Array, Outputs]:
        def compute(x_BTD: jax.Array, of_layer: tuple[Block, Rows]) -> tuple[jax.Array, Means]:
            return parts.layer_of(kind)(of_layer[0], stream._replace(x_BTD=x_BTD), of_layer[1])

        y_BTD, means = _checkpointed(compute, kept)(x_BTD, (block, row))
        return y_BTD, (None, means)

    return layer


def _checkpointed(layer: Callable[..., Tree], kept: Sequence[str] | None) -> Callable[..., Tree]:
    if kept is not None:
        return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*kept))
    partition = active()
    if partition is None or not partition.splits_weights:
        return layer
    return jax.checkpoint(layer, policy=_everything_but_constrained)


def _everything_but_constrained(primitive: Any, *_: object, **__: object) -> bool:
    return primitive.name != "sharding_constraint"


def summed_once(schedule: StepSchedule) -> StepSchedule:
    """`schedule` on each replica, with its part of every microbatch, and then the mean over the replicas: gradients
    cross between replicas once a step (mesh.sum_gradients per_step). Otherwise the partitioner sums the gradient of
    each layer over the replicas in each microbatch, as soon as it is known.

    The loss of a microbatch must be the mean of its replicas' losses: `Batch.of` scales its weights so. The statistics
    of routers are of the tokens of all replicas (`ops.experts.routing.total`). The squared norms are of the replicas'
    parts, (replicas * A,), or None.
    """
    return schedule._replace(gradients=functools.partial(_gradients_of_replicas, schedule))


def _gradients_of_replicas(
    schedule: StepSchedule, parts: ModelFunctions, trained: Params, frozen: Params, batch: Batch
) -> tuple[Params, Metrics, jax.Array | None]:
    partition = active()
    if partition is None:
        raise AssertionError("replicas need a partition")
    replicas = Replicas(partition)

    def run(trained: Params, frozen: Params, batch: Batch) -> tuple[Params, Metrics, jax.Array | None]:
        gradient, metrics, squares = schedule.gradients(parts, trained, frozen, batch)
        return *replicas.mean((gradient, metrics)), squares

    run = replicas.run(run, (P(), P(), replicas.split(1)), (P(), P(), replicas.split(0)))
    gradient, metrics, squares = run(trained, frozen, batch)
    return parts.constrain(gradient), metrics, squares
