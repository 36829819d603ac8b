"""Gradients and losses of a model that is given as plain functions, in stages and on one device."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.errors import UserError
from mesh_transformer.models import Stream
from mesh_transformer.parallel import Partition, dimension_rules, make_mesh, mesh_shape
from mesh_transformer.train import Kind, LayerGroup, ModelFunctions, Optimizer, gradients, jit, loss

MICROBATCHES, ROWS, POSITIONS, VOCABULARY, WIDTH, LAYERS = 4, 4, 8, 16, 8, 4
AXES = {
    "embed": {"table": (None, "embed"), "bias": ("embed",)},
    "blocks": {"w": ("layers", "embed", None)},
    "head": {"scale": ("embed",)},
}
# float32 sums in another order
CLOSE = 1e-5


def _parts(*, tied: bool, shared_out: str, leading: bool = False) -> ModelFunctions:
    """Tied: the head reads the embedding's table. Else every layer reads a bias of the embedding. Leading: one more
    layer stands before the others, with one more matrix."""

    def embed(params: Any, batch: Any) -> Stream:
        waves = jnp.cos(jnp.arange(POSITIONS, dtype=jnp.float32))[None, :, None]
        return Stream(params["table"][batch["tokens"]], None if tied else params["bias"], waves)

    def layer(params: Any, stream: Stream, own: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        bias = 0.0 if stream.learned is None else stream.learned[None, None]
        x_BTD = stream.x_BTD @ params["first"] if "first" in params else stream.x_BTD
        return x_BTD + own * stream.fixed * jnp.tanh(x_BTD @ params["w"] + bias), {}

    def head(params: Any, x_BTD: jax.Array, batch: Any) -> tuple[jax.Array, Any]:
        weights = params["embed"]["table"] if tied else jnp.eye(VOCABULARY, WIDTH)
        logits = (x_BTD * params["head"]["scale"][None, None]) @ weights.T
        nll = -(jax.nn.log_softmax(logits) * jax.nn.one_hot(batch["targets"], VOCABULARY)).sum(-1)
        return nll.sum() / (ROWS * POSITIONS), {"nll": nll}

    def metrics(value: jax.Array, results: Any, means: Any) -> dict[str, jax.Array]:
        return {"loss": value, "largest": results["nll"].max()}

    numbers, axes, groups = jnp.linspace(0.5, 1.0, LAYERS + leading), AXES, None
    if leading:
        names = ("whole_layers", "embed", None)
        axes = {**AXES, "blocks": {"0/w": names, "0/first": names, "1/w": AXES["blocks"]["w"]}}
        groups = LayerGroup((Kind(None, ("w", "first")),), 1), LayerGroup((Kind(None, ("w",)),), LAYERS)
    return ModelFunctions(
        embed,
        layer,
        head,
        axes,
        metrics=metrics,
        numbers=numbers,
        tied=tied,
        shared_out=shared_out,
        layer_groups=groups,
    )


def _with_means(parts: ModelFunctions) -> ModelFunctions:
    """The parts with a mean and a loss of each layer."""

    def layer(params: Any, stream: Stream, numbers: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        x_BTD, _ = parts.layer(params, stream, numbers)
        return x_BTD, {"load": jnp.square(x_BTD).mean()}

    def metrics(value: jax.Array, results: Any, means: Any) -> dict[str, jax.Array]:
        return {"loss": value, "load": means["load"]}

    return parts._replace(layer=layer, layer_loss=lambda means: means["load"], metrics=metrics)


def _params(leading: bool) -> Any:
    random = np.random.default_rng(0)
    shapes = {
        "embed": {"table": (VOCABULARY, WIDTH), "bias": (WIDTH,)},
        "blocks": {"w": (LAYERS, WIDTH, WIDTH)},
        "head": {"scale": (WIDTH,)},
    }
    if leading:
        one = {"0/w": (1, WIDTH, WIDTH), "0/first": (1, WIDTH, WIDTH)}
        shapes["blocks"] = {**one, "1/w": (LAYERS, WIDTH, WIDTH)}
    draw: Callable[[Any], Any] = lambda shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda node: isinstance(node, tuple))


def _batch(rows: int = ROWS) -> Any:
    draws = np.random.default_rng(1).integers(0, VOCABULARY, (2, MICROBATCHES, rows, POSITIONS))
    return dict(zip(("tokens", "targets"), draws.astype(np.int32), strict=True))


def _on(**axes: int) -> Partition:
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return Partition(make_mesh(mesh_shape(**axes), devices), dimension_rules())


def _computed(partition: Partition, parts: ModelFunctions, rounds: int, last: bool = False) -> Any:
    one = jax.tree.map(lambda x: x[0], _batch())
    params = _params(parts.layer_groups is not None)
    if last:
        params["blocks"]["2/w"] = params["blocks"]["0/w"] / 2
    # two programs: XLA for CPU may start the collectives of two pipelines in another order on each device, and hang
    steps = (lambda p: gradients(parts, p, _batch(), rounds=rounds)), (lambda p: loss(parts, p, one, rounds=rounds))
    return tuple(jax.device_get(jit(partition, step)(params)) for step in steps)


@pytest.mark.parametrize(
    ("tied", "shared_out", "rounds", "leading"),
    [
        (True, "batch", 1, False),
        (False, "block_seq", 2, False),
        (True, "block_seq", 1, True),
        (False, "batch", 2, True),
    ],
)
def test_stages_of_plain_functions_equal_one_device(tied: bool, shared_out: str, rounds: int, leading: bool) -> None:
    parts = _parts(tied=tied, shared_out=shared_out, leading=leading)
    ours, one = (_computed(partition, parts, rounds) for partition in (_on(pp=2, fsdp=2), _on(dp=1)))
    (gradient, metrics, squares), evaluated = ours
    (one_gradient, one_metrics, one_squares), one_evaluated = one

    def close(x: Any, y: Any) -> None:
        np.testing.assert_allclose(x, y, rtol=0, atol=CLOSE * max(np.abs(y).max(), 1e-3))

    jax.tree.map(close, (gradient, metrics, evaluated), (one_gradient, one_metrics, one_evaluated))
    # the stages do not sum the gradient of a microbatch
    assert squares is None
    assert one_squares.shape == (MICROBATCHES,)


def test_layers_that_every_stage_computes_have_losses_and_means() -> None:
    """One layer before the group that the stages share out, and one after it."""
    parts = _with_means(_parts(tied=True, shared_out="batch", leading=True))
    before, pipelined = parts.layer_groups or ()
    axes = {**parts.axes, "blocks": {**parts.axes["blocks"], "2/w": ("whole_layers", "embed", None)}}
    numbers = jnp.linspace(0.5, 1.0, LAYERS + 2)
    parts = parts._replace(layer_groups=(before, pipelined, pipelined._replace(repeats=1)), axes=axes, numbers=numbers)
    # the last group has the kind of the pipelined one: `spec.layer_groups_of` would not cut there
    ours, one = (_computed(partition, parts, 1, last=True) for partition in (_on(pp=2, fsdp=2), _on(dp=1)))
    (*ours_gradients, _), (*one_gradients, _) = ours[0], one[0]
    assert ours_gradients[1]["load"].shape == (LAYERS + 2,)
    close = functools.partial(np.testing.assert_allclose, rtol=CLOSE, atol=CLOSE)
    jax.tree.map(close, (ours_gradients, ours[1]), (one_gradients, one[1]))


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: mesh_shape(tp=2, ddp=4), "unknown mesh axis ddp: the axes are pp, dp, fsdp, ep, cp, tp"),
        (lambda: make_mesh(mesh_shape(tp=3), jax.devices()), "a mesh tp 3 needs 3 devices, found 8"),
        (
            lambda: Partition(_on(dp=2).mesh, {"mlp": "tp"}),
            "the rule of dimension mlp is 'tp': give None, or a tuple of",
        ),
        (lambda: _on(dp=2).sharding("pixels"), "dimension pixels has no rule: name one of batch, seq,"),
        (lambda: _on(dp=2).size("pixels"), "dimension pixels has no rule"),
        (lambda: Optimizer.named("sgd", AXES), "unknown optimizer sgd: the optimizers are adam, lion, adafactor"),
        (lambda: Optimizer.named("adam", AXES, lr=-1), "optimizer adam: lr -1: Input should be"),
        (
            lambda: _computed(_on(pp=8), _parts(tied=True, shared_out="block_seq"), 1),
            "the layers are 4 x 1 (repeats of a period x its layers): 8 stages x 1 rounds of a pipeline divide none",
        ),
        (
            lambda: _computed(_on(pp=4, dp=2), _parts(tied=True, shared_out="batch"), 1),
            "4 stages share out the dimension batch of a batch for the loss, and 2 devices of each split it: dimension "
            "1 of an array (4, 4, 8) is not divisible by 8",
        ),
    ],
)
def test_refused(attempt: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        attempt()
