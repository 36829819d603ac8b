"""Routed experts compiled for TPU slices without a TPU. The tests need libtpu (docs/benchmarks.md) and are skipped
without it."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from mesh_transformer.config import MeshConfig, mesh_shape
from mesh_transformer.config.mesh import training_rules
from mesh_transformer.estimate.hlo import collectives
from mesh_transformer.estimate.tpus import slice_devices
from mesh_transformer.ops.experts import Dispatch, Routing, apply
from mesh_transformer.parallel.mesh import make_mesh
from mesh_transformer.parallel.sharding import Partition, constrain, use

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("libtpu")]


def compiled(
    slice_name: str, mesh: dict[str, int], dispatch: Dispatch, tokens: tuple[int, int, int], d: int, e: int, f: int
) -> jax.stages.Compiled:
    """The output and all gradients of a layer in bfloat16, for `tokens` (B, T, k)."""
    devices = slice_devices(slice_name)[: 8 if mesh else 1]
    rules = training_rules(MeshConfig(shard_activations=True, tp=2))
    partition = Partition(make_mesh(mesh_shape(**mesh), devices), rules)

    def array(dtype, shape, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=partition.sharding(*axes))

    def layer(x, weights, gate, in_, out, experts):
        y, _ = apply(dispatch, x, Routing(weights, experts, weights), gate, in_, out, jax.nn.silu)
        return jnp.square(constrain(y, "batch", "block_seq", None).astype(jnp.float32)).mean()

    bf16, choice = jnp.bfloat16, ("batch", "block_seq", None)
    wide = array(bf16, (e, d, f), "experts", None, "mlp")
    inputs = (
        array(bf16, (*tokens[:2], d), "batch", "block_seq", None),
        array(jnp.float32, tokens, *choice),
        wide,
        wide,
        array(bf16, (e, f, d), "experts", "mlp", None),
    )
    with use(partition):
        split = [x.sharding for x in inputs]
        run = jax.jit(jax.value_and_grad(layer, range(5)), out_shardings=(None, tuple(split)))
        return run.lower(*inputs, array(jnp.int32, tokens, *choice)).compile()


def test_the_gradients_of_one_layer_of_olmoe_cost_what_the_choices_need() -> None:
    """The gradient of the matrices is not computed for every pair of a token and an expert: 26 TFLOP."""
    b, t, k, d, e, f = 2, 2048, 8, 2048, 64, 1024
    found = compiled("v4-8", {}, Dispatch(), (b, t, k), d, e, f)
    # three products, each with two gradients
    needed = 9 * 2 * b * t * k * d * f
    assert found.cost_analysis()["flops"] == pytest.approx(needed, rel=0.01)
    assert found.as_text().count('custom_call_target="tpu_custom_call"') == 9


@pytest.mark.parametrize(
    ("exchange", "kinds"),
    [
        # rows go to the experts and back, and so do their gradients; before them the numbers of rows. The sums over tp
        # of the outputs and of the gradients of the tokens are split over it.
        ("tokens", {"all-to-all": 5, "reduce-scatter": 2}),
        # the same sums, first over ep and then over tp
        ("gather", {"all-to-all": 0, "reduce-scatter": 4}),
    ],
)
def test_collectives(exchange: str, kinds: dict[str, int]) -> None:
    mesh = {"fsdp": 2, "ep": 2, "tp": 2}
    text = compiled("v5e-8", mesh, Dispatch(exchange), (8, 256, 2), d=256, e=8, f=256).as_text()
    found = Counter(one.kind for one in collectives(text))
    # the compiler for TPU joins a sum and its split in a computation of this name
    found["reduce-scatter"] += text.count("calls=%all-reduce-scatter")
    assert {kind: found[kind] for kind in kinds} == kinds
