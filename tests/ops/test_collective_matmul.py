"""Products with matrices that devices split, against the plain products on one device."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.covering import covering

from mesh_transformer.config import MeshConfig, mesh_shape
from mesh_transformer.config.mesh import training_rules
from mesh_transformer.estimate.hlo import Module
from mesh_transformer.ops.linear import column, row
from mesh_transformer.parallel.mesh import make_mesh
from mesh_transformer.parallel.sharding import Partition, constrain, use

B, T, D, F, J = 4, 48, 16, 32, 6
MESHES = {
    "tp2": {"tp": 2},
    "tp3": {"tp": 3},
    "tp4": {"tp": 4},
    "tp8": {"tp": 8},
    "cp2_tp4": {"cp": 2, "tp": 4},
    "dp2_cp2_tp2": {"dp": 2, "cp": 2, "tp": 2},
    "dp2_tp4": {"dp": 2, "tp": 4},
    "fsdp4_tp2": {"fsdp": 4, "tp": 2},
}
# float32 sums in another order
CLOSE = 2e-6


def partition_of(mesh: str, overlap_tp: bool) -> Partition:
    sizes = MESHES[mesh]
    shape = mesh_shape(**sizes)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    rules = training_rules(MeshConfig(shard_activations=True, tp=2))
    partition = Partition(make_mesh(shape, devices), rules, overlap_tp=overlap_tp)
    return partition.keep_whole("kv_heads")


def arrays(dtype: Any = jnp.float32) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape).astype(dtype)

    # F is divisible by 3 too
    inputs = normal(D, 3 * F), normal(D, 3 * F), normal(D, J)
    return normal(B, T, D), inputs, (normal(3 * F, D), normal(3 * F, D)), normal(B, T, D)


def block(x: jax.Array, inputs: Sequence[jax.Array], outputs: Sequence[jax.Array]) -> jax.Array:
    """Two split products and a whole one of the same input, and the sum of two products."""
    x = constrain(x, "batch", "block_seq", "act_embed")
    p, q, kept = column(x, list(inputs), ["mlp", "heads", "kv_heads"])
    p, q = (constrain(y, "batch", "seq", "mlp") for y in (p, q))
    # a sum over positions, as attention has
    shared = constrain(kept, "batch", "seq", "kv_heads").sum((1, 2), keepdims=True)
    y = row([jnp.sin(p) * shared, jnp.cos(q)], list(outputs))
    return x + constrain(y, "batch", "block_seq", "act_embed")


def value_and_gradients(partition: Partition | None, dtype: Any = jnp.float32) -> Any:
    x, inputs, outputs, dy = arrays(dtype)

    @jax.jit
    def run(x, inputs, outputs, dy):
        with use(partition):
            y, pull = jax.vjp(block, x, inputs, outputs)
            return y, pull(dy)

    return jax.device_get(run(x, inputs, outputs, dy))


@functools.cache
def on_one_device() -> Any:
    return value_and_gradients(None)


def differences(ours: Any, others: Any) -> list[float]:
    """The largest difference of each array, relative to its largest value."""
    return [
        float(np.abs(a.astype(np.float32) - b.astype(np.float32)).max() / np.abs(b).max())
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(others), strict=True)
    ]


@pytest.mark.parametrize(("mesh", "overlap_tp"), covering(MESHES, [True, False]))
def test_products_and_gradients_equal_one_device(mesh: str, overlap_tp: bool) -> None:
    assert max(differences(value_and_gradients(partition_of(mesh, overlap_tp)), on_one_device())) < CLOSE


@pytest.mark.parametrize("overlap_tp", [True, False])
def test_bfloat16(overlap_tp: bool) -> None:
    """On CPU too, where XLA aborts at some sums in bfloat16."""
    ours = value_and_gradients(partition_of("dp2_tp4", overlap_tp), jnp.bfloat16)
    # bfloat16 has 8 bits, and the values are sums of products of rounded numbers
    assert max(differences(ours, value_and_gradients(None, jnp.bfloat16))) < 0.05


def instructions(mesh: str, overlap_tp: bool) -> list[Any]:
    """Those of the forward pass, compiled."""
    partition = partition_of(mesh, overlap_tp)
    x, inputs, outputs, _ = arrays()

    def run(x, inputs, outputs):
        with use(partition):
            return block(x, inputs, outputs)

    sharding = partition.sharding("batch", "block_seq", "act_embed")
    compiled = jax.jit(run, in_shardings=(sharding, None, None), out_shardings=sharding).lower(x, inputs, outputs)
    return list(Module(compiled.compile().as_text()).instructions.values())


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_ring_sends_each_chunk_the_shorter_way(devices: int) -> None:
    """A gather and a scatter, each of n - 1 chunks; half of them go to the next device, half to the one before."""
    found = [one for one in instructions(f"tp{devices}", overlap_tp=True) if one.kind]
    # the whole product is gathered at once
    assert {one.kind for one in found} - {"collective-permute"} <= {"all-gather", "all-reduce"}
    assert max(one.nbytes for one in found if one.kind != "collective-permute") < 4 * B * T * D
    firsts = [re.search(r"source_target_pairs=\{\{0,(\d+)\}", one.rest)[1] for one in found if "permute" in one.kind]
    ahead, behind = devices // 2, (devices - 1) // 2
    # on two devices the next is the one before
    expected = {"1": 2 * ahead} | ({str(devices - 1): 2 * behind} if behind else {})
    assert {number: firsts.count(number) for number in set(firsts)} == expected


def test_without_overlap_one_gather_and_one_scatter() -> None:
    found = [one for one in instructions("tp4", overlap_tp=False) if one.kind]
    # the rest is that of the whole product
    large = [one for one in found if one.kind == "reduce-scatter" or one.nbytes >= 4 * B * T * D]
    assert sorted(one.kind for one in large) == ["all-gather", "reduce-scatter"]
