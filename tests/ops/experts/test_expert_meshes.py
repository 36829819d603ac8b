"""Routed experts on meshes, against torch in float64 with every expert dense."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.covering import covering
from support.experts import Problem, relative_differences

from mesh_transformer.config import MeshConfig, mesh_shape
from mesh_transformer.config.mesh import training_rules
from mesh_transformer.estimate.hlo import collectives
from mesh_transformer.ops.experts import Biases, Dispatch, Routing, apply, dispatch, route, statistics
from mesh_transformer.parallel.mesh import make_mesh
from mesh_transformer.parallel.replicas import Replicas
from mesh_transformer.parallel.sharding import Partition, constrain, use
from mesh_transformer.spec import RouterSpec

MESHES = {
    "ep4": {"ep": 4},
    "ep8": {"ep": 8},
    "dp2_ep4": {"dp": 2, "ep": 4},
    "fsdp2_ep2_tp2": {"fsdp": 2, "ep": 2, "tp": 2},
    "cp2_ep2_tp2": {"cp": 2, "ep": 2, "tp": 2},
    "fsdp2_tp4": {"fsdp": 2, "tp": 4},
}
# float32 sums in another order
CLOSE = 5e-6
PROBLEM = Problem.random(8, 6, d=16, f=8, experts=8, chosen=3, empty=(2, 6))
PROBLEMS = {
    "plain": PROBLEM,
    "biases": PROBLEM.with_biases(gated=True),
    "no gate": PROBLEM.with_biases(gated=False),
    # each token chooses experts 4 to 7, in any order: all experts of the last devices
    "full": Problem.random(8, 6, d=16, f=8, experts=8, chosen=4, empty=(0, 1, 2, 3)),
}


def partition_of(mesh: str, **rules: Any) -> Partition:
    sizes = MESHES[mesh]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    made = training_rules(MeshConfig(shard_activations=True, tp=2))
    return Partition(make_mesh(mesh_shape(**sizes), devices), {**made, **rules})


def outputs(
    partition: Partition | None, dispatch: Dispatch, dtype: Any = jnp.float32, kind: str = "plain"
) -> tuple[list[Any], float]:
    """The output and the gradients, and the number of dropped choices."""
    problem = PROBLEMS[kind]
    x, weights, *parameters = problem.inputs

    @jax.jit
    def run(inputs, dy):
        def layer(x, weights, *parameters):
            x = constrain(x, "batch", "block_seq", None)
            routing = Routing(weights, jnp.asarray(problem.experts_BTk), weights)
            matrices, biases = problem.split(parameters)
            y, dropped = apply(dispatch, x, routing, *matrices, jax.nn.silu, Biases(*biases))
            return constrain(y, "batch", "block_seq", None), dropped

        with use(partition):
            y, pull, dropped = jax.vjp(layer, *inputs, has_aux=True)
            return [y, *pull(dy)], dropped

    inputs = (x.astype(dtype), weights, *(w.astype(dtype) for w in parameters))
    found, dropped = run(inputs, problem.dy_BTD.astype(dtype))
    return [np.asarray(a, np.float64) for a in found], float(dropped)


@functools.cache
def dense(kind: str = "plain") -> list[np.ndarray]:
    y, gradients = PROBLEMS[kind].dense()
    return [y, *gradients]


@pytest.mark.parametrize(
    ("mesh", "exchange", "check_vma", "kind"),
    covering(MESHES, ["tokens", "gather"], [True, False], PROBLEMS, pairs=True),
)
def test_devices_compute_what_one_device_computes(
    mesh: str, exchange: str, check_vma: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not check_vma:
        monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    found, dropped = outputs(partition_of(mesh), Dispatch(exchange), kind=kind)
    assert max(relative_differences(found, dense(kind))) < CLOSE
    assert dropped == 0


@pytest.mark.parametrize(("mesh", "exchange", "kind"), covering(MESHES, ["tokens", "gather"], PROBLEMS, pairs=True))
def test_a_device_computes_up_to_the_capacity_of_its_tokens(mesh: str, exchange: str, kind: str) -> None:
    sizes = MESHES[mesh]
    splits = {"dp", "fsdp"} | ({"ep"} if exchange == "tokens" else set())
    parts = int(np.prod([size for axis, size in sizes.items() if axis in splits]))
    problem = PROBLEMS[kind]
    fits = problem.kept(1.0, parts, sizes.get("cp", 1))
    y, gradients = problem.dense(fits)
    found, dropped = outputs(partition_of(mesh), Dispatch(exchange, capacity_factor=1.0), kind=kind)
    assert max(relative_differences(found, [y, *gradients])) < CLOSE
    assert dropped == (1 - fits).sum() > 0


@pytest.mark.parametrize(("mesh", "room"), [("ep4", 2), ("ep8", 1)])
def test_the_room_between_two_devices_is_filled_to_its_last_row(mesh: str, room: int) -> None:
    """A device has 2 experts, or 1, and gets so many of the 4 choices of each token."""
    partition, problem = partition_of(mesh), PROBLEMS["full"]
    found, _ = outputs(partition, Dispatch(), kind="full")
    assert max(relative_differences(found, dense("full"))) < CLOSE

    def layer(x: jax.Array, routing: Routing) -> jax.Array:
        return apply(Dispatch(), x, routing, *problem.parameters[:3], jax.nn.silu)[0]

    routing = Routing(problem.weights_BTk, problem.experts_BTk, problem.weights_BTk)
    with use(partition):
        program = jax.jit(layer).lower(problem.x_BTD, routing).compile()
    sequences, positions, width = problem.x_BTD.shape
    # devices x (tokens of one) = all tokens; the number of each expert's rows goes before
    rows, counts = 4 * room * sequences * positions * width, 4 * len(problem.in_EDF)
    sent = [one.nbytes for one in collectives(program.as_text()) if one.kind == "all-to-all"]
    assert sorted(sent) == [counts, rows, rows]


def test_devices_that_all_have_the_whole_batch() -> None:
    """As in a server: each computes its experts."""
    found, _ = outputs(partition_of("fsdp2_ep2_tp2", batch=None), Dispatch())
    assert max(relative_differences(found, dense())) < CLOSE


@pytest.mark.parametrize(("exchange", "kind"), [("tokens", "plain"), ("gather", "plain"), ("tokens", "biases")])
def test_bfloat16(exchange: str, kind: str) -> None:
    """On CPU too, where XLA aborts at some sums in bfloat16."""
    found, _ = outputs(partition_of("fsdp2_ep2_tp2"), Dispatch(exchange), jnp.bfloat16, kind)
    # bfloat16 has 8 bits, and the values are sums of products of rounded numbers
    assert max(relative_differences(found, dense(kind))) < 0.05


def test_inside_of_replicas() -> None:
    """Each replica has a part of the batch. The statistics and the drops are of the whole batch."""
    partition, router = partition_of("dp2_ep4"), RouterSpec(chosen=3, normalize=True)
    replicas = Replicas(partition)
    logits = np.random.default_rng(3).normal(size=(8, 6, 8)).astype(np.float32)
    matrices = PROBLEM.inputs[2:]

    def layer(logits, x, matrices):
        routing = route(router, logits)
        y, dropped = apply(Dispatch("tokens", 1.0), x, routing, *matrices, jax.nn.silu)
        found = statistics(logits, routing)
        return found["balance"] + found["z"] + (y * y).mean(), (found["share_E"], dropped)

    def whole(*arrays):
        with use(partition):
            return jax.value_and_grad(layer, (0, 1, 2), has_aux=True)(*arrays)

    def mean(*arrays):
        (loss, sums), (d_logits, dx, d_matrices) = whole(*arrays)
        loss, d_matrices = replicas.mean((loss, d_matrices))
        return (loss, sums), (d_logits / 2, dx / 2, d_matrices)

    split, none = replicas.split(0), PartitionSpec()
    run = replicas.run(mean, (split, split, none), ((none, (none, none)), (split, split, none)))
    arrays = logits, PROBLEM.x_BTD, matrices
    ours, others = jax.jit(run)(*arrays), jax.jit(whole)(*arrays)
    assert float(others[0][1][1]) > 0
    assert max(relative_differences(*map(jax.tree.leaves, (ours, others)))) < CLOSE
