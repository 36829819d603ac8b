"""Attention whose positions are split over devices, against the plain form on one device."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.covering import covering

from mesh_transformer.config import MeshConfig, mesh_shape
from mesh_transformer.config.mesh import training_rules
from mesh_transformer.estimate.hlo import collective_bytes, collectives
from mesh_transformer.estimate.programs import without_cache
from mesh_transformer.ops.attend import context
from mesh_transformer.ops.attend.causal import Causal
from mesh_transformer.parallel.mesh import make_mesh
from mesh_transformer.parallel.sharding import Partition, use

B, T, H, K, SCALE = 2, 48, 4, 8, 0.3
MODES = ["zigzag", "ring", "ulysses", "gather"]
MESHES = {"cp4": {"cp": 4}, "cp2_fsdp2_tp2": {"cp": 2, "fsdp": 2, "tp": 2}, "cp3": {"cp": 3}}
# segments of several devices, and of a part of one
SEGMENTS_BT = np.repeat([[0, 1, 2, 3], [5, 4, 3, 2]], [3, 20, 24, 1], axis=1).astype(np.int32)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "grouped": {"key_heads": 2},
    "one_key_head": {"key_heads": 1, "window": 70},
    "window": {"window": 7},
    "window_of_two": {"window": 2},
    "softcap": {"softcap": 0.5, "bias": True},
    "segments": {"segments": True},
    "all": {"segments": True, "window": 9, "softcap": 0.5, "key_heads": 2},
}
# a mesh, heads, and heads of keys, which are repeated until each device has whole ones
REPEATED_KEY_HEADS = {
    "cp4": ({"cp": 4}, 8, 2),
    "cp2_tp2": ({"cp": 2, "tp": 2}, 8, 2),
    "cp2_one_key_head": ({"cp": 2}, 8, 1),
    "cp8": ({"cp": 8}, 8, 4),
    "cp4_not_divisible": ({"cp": 4}, 12, 6),
}
# float32 sums in another order
CLOSE = 5e-6


@pytest.fixture
def no_compile_cache() -> Iterator[None]:
    """The compiler warns only when it compiles."""
    with without_cache():
        yield


def partition_of(mesh: str, mode: str) -> Partition:
    shape = mesh_shape(**MESHES[mesh])
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    return Partition(make_mesh(shape, devices), training_rules(MeshConfig()), context_mode=mode)


def output_and_gradients(attend: Any, case: dict[str, Any], order: Any, dtype: Any = jnp.float32) -> Any:
    """The output and the gradients of q, k, v and the bias, with positions in `order`, and back in ascending order."""
    keys = jax.random.split(jax.random.key(0), 5)
    key_heads = case.get("key_heads", H)
    heads = (H, key_heads, key_heads, H)
    *qkv, dy = (jax.random.normal(key, (B, T, h, K)).astype(dtype) for key, h in zip(keys, heads, strict=False))
    bias = jax.random.normal(keys[4], (1, H, T, T)) if "bias" in case else None
    window = jnp.int32(case["window"]) if "window" in case else None
    segments = jnp.asarray(SEGMENTS_BT) if "segments" in case else None

    @jax.jit
    def run(q, k, v, bias, dy):
        bias = None if bias is None else bias[:, :, order][..., order]
        own = None if segments is None else segments[:, order]

        def mixed(q, k, v, bias):
            return attend(bias, own)(q, k, v, scale=SCALE, window=window, softcap=case.get("softcap"))

        y, pull = jax.vjp(mixed, *(x[:, order] for x in (q, k, v)), bias)
        *gradients, dbias = pull(dy[:, order])
        back = np.argsort(order)
        dbias = None if dbias is None else dbias[:, :, back][..., back]
        return [x[:, back] for x in (y, *gradients)], dbias

    return jax.device_get(run(*qkv, bias, dy))


@functools.cache
def on_one_device(case: str) -> Any:
    return output_and_gradients(Causal, CASES[case], np.arange(T))


def split(mesh: str, mode: str, case: str, dtype: Any = jnp.float32) -> Any:
    partition = partition_of(mesh, mode)
    order = partition.sequence_order(T)
    with use(partition):
        return output_and_gradients(context.attention, CASES[case], np.arange(T) if order is None else order, dtype)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_is_close_to_float32(mode: str) -> None:
    """The softmax and its sums are float32: the error is that of the inputs and of the products, 2^-8."""
    found, _ = split("cp4", mode, "grouped", jnp.bfloat16)
    for ours, exact in zip(found, on_one_device("grouped")[0], strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(ours.astype(np.float32), exact, rtol=0, atol=0.04 * np.abs(exact).max())


@pytest.mark.parametrize("mode", ["zigzag", "ring"])
def test_memory_is_flat_and_a_visit_sends_keys_and_values_once(mode: str) -> None:
    """With 64 positions on each device, a longer sequence on more devices needs no more memory.

    In the backward pass the gradients of keys and values travel too.
    """
    compiled = {cp: compiled_gradient(cp, 64 * cp, mode) for cp in (4, 8)}
    four, eight = (one.memory_analysis().temp_size_in_bytes for one in compiled.values())
    assert eight < 1.05 * four
    for cp, one in compiled.items():
        sent = [found for found in collectives(one.as_text()) if found.kind == "collective-permute"]
        assert {found.kind for found in collectives(one.as_text())} == {"collective-permute"}
        in_loop = [found for found in sent if found.loops]
        backward = [found for found in in_loop if "transpose(" in found.loops[-1]]
        assert sum(array.size for found in in_loop for array in found.arrays) == (2 + 4) * 64 * H * K, cp
        assert sum(array.size for found in backward for array in found.arrays) == 4 * 64 * H * K, cp


def test_the_memory_check_can_fail() -> None:
    """Gathered keys and the weights of the softmax grow with the sequence, and the check detects it."""
    four, eight = (compiled_gradient(cp, 64 * cp, "gather").memory_analysis().temp_size_in_bytes for cp in (4, 8))
    assert eight > 1.5 * four


def compiled_gradient(cp: int, length: int, mode: str) -> Any:
    shape = mesh_shape(cp=cp)
    partition = Partition(make_mesh(shape, jax.devices()[:cp]), training_rules(MeshConfig()), context_mode=mode)

    def loss(q: Any, k: Any, v: Any) -> Any:
        with use(partition):
            return context.attention()(q, k, v, scale=SCALE).sum()

    x = jax.ShapeDtypeStruct((1, length, H, K), jnp.float32, sharding=partition.sharding("batch", "seq", None, None))
    shardings = (x.sharding,) * 3
    return jax.jit(jax.grad(loss, (0, 1, 2)), in_shardings=shardings, out_shardings=shardings).lower(x, x, x).compile()


@pytest.mark.parametrize("case", REPEATED_KEY_HEADS)
def test_ulysses_sends_heads_once_and_gathers_no_positions(case: str, no_compile_cache: None, capfd: Any) -> None:
    """Also where heads of keys are fewer than the devices: each device gets the keys of its own heads."""
    mesh, heads, key_heads = REPEATED_KEY_HEADS[case]
    sent = collective_bytes(compiled_attention(mesh, "ulysses", heads, key_heads))
    n = math.prod(mesh.values())
    # q, k, v, the output and their gradients
    assert sent == {"all-to-all": 4 * (heads + math.lcm(key_heads, n)) * B * T * K * 4 // n}
    assert "rematerialization" not in capfd.readouterr().err


def test_gather_gathers_keys_and_values_of_a_device_s_own_sequences_and_heads() -> None:
    """Not what other axes split. The gradients of keys and values return by position."""
    sent = collective_bytes(compiled_attention({"cp": 2, "fsdp": 2, "tp": 2}, "gather", 8, 2))
    own = 2 * B // 2 * T * 1 * K * 4
    assert sent == {"all-gather": own, "all-to-all": own}


def test_ulysses_sends_less_than_gather_if_it_needs_less() -> None:
    """See docs/parallelism.md: heads and repeated heads of keys are fewer than heads of keys times devices."""
    less, more = (sum(collective_bytes(compiled_attention({"cp": 8}, mode, 8, 4)).values()) for mode in MODES[2:])
    assert less < more


def compiled_attention(mesh: dict[str, int], mode: str, heads: int, key_heads: int) -> str:
    """The program of the output and the gradients of q, k and v, after a rotation as of rotary positions."""
    shape = mesh_shape(**mesh)
    devices = jax.devices()[: math.prod(shape.values())]
    partition = Partition(make_mesh(shape, devices), training_rules(MeshConfig()), context_mode=mode)
    q, k = (
        jax.ShapeDtypeStruct((B, T, n, K), jnp.float32, sharding=partition.sharding("batch", "seq", "heads", None))
        for n in (heads, key_heads)
    )

    def rotated(x: jax.Array) -> jax.Array:
        left, right = jnp.split(x, 2, axis=3)
        return jnp.concatenate([left - right, left + right], axis=3)

    def run(q: Any, k: Any, v: Any, dy: Any) -> Any:
        with use(partition):
            y, pull = jax.vjp(lambda q, k, v: context.attention()(rotated(q), rotated(k), v, scale=SCALE), q, k, v)
            return y, *pull(dy)

    split = tuple(x.sharding for x in (q, q, k, k))
    return jax.jit(run, out_shardings=split).lower(q, k, k, q).compile().as_text()


@pytest.mark.parametrize("length", [16, 24])
def test_the_order_of_zigzag_is_a_permutation(length: int) -> None:
    order = partition_of("cp4", "zigzag").sequence_order(length)
    assert order is not None
    assert sorted(order) == list(range(length))
    work = (order.reshape(4, -1) + 1).sum(1)
    assert len(set(work)) == 1
    assert partition_of("cp4", "ring").sequence_order(length) is None


@pytest.mark.parametrize(("mode", "mesh", "case"), covering(MODES, MESHES, CASES, pairs=True))
def test_outputs_and_gradients_equal_one_device(mode: str, mesh: str, case: str) -> None:
    if mode == "ulysses" and mesh == "cp3":
        mesh = "cp4"
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=CLOSE * np.abs(b).max()),
        split(mesh, mode, case),
        on_one_device(case),
    )
