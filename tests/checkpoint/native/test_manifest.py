"""Checksums, and the encoding of the manifest."""

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.states import abstract, mesh, shardings, state, tp8

from mesh_transformer.checkpoint.native import manifest as manifests
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint
from mesh_transformer.errors import UserError


def test_checksums_do_not_depend_on_the_mesh() -> None:
    layouts = [tp8(), shardings(mesh(dp=4, tp=2), rows="dp", columns="tp"), shardings(mesh())]
    first, *others = [manifests.describe(state(7, on), {}) for on in layouts]
    assert others == [first, first]
    assert manifests.describe(state(8), {}) != first
    on_two_meshes = tp8()._replace(step=shardings(mesh(tp=2)).step)
    assert manifests.describe(state(7, on_two_meshes), {}) == first
    assert manifests.describe(jax.tree.map(np.asarray, state(7)), {}) == first


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, jnp.bool_])
def test_any_flipped_bit_changes_the_checksum(dtype: Any) -> None:
    good = np.arange(6).astype(dtype)
    expected = manifests.describe({"x": good}, {})
    # the host and the devices compute the same checksum
    manifests.verify(expected, {"x": manifests.array_checksum(good, (0,))})
    bits = 1 if dtype == jnp.bool_ else 8 * good.dtype.itemsize
    for bit in range(bits):
        bad = good.copy()
        word = bad.view(f"u{good.dtype.itemsize}")
        word[3] ^= word.dtype.type(1 << bit)
        with pytest.raises(DamagedCheckpoint, match="wrong checksum of x"):
            manifests.verify(expected, {"x": manifests.array_checksum(bad, (0,))})
        assert manifests.describe({"x": bad}, {}) != expected


def exchanged(array: np.ndarray, axis: int, one: int, other: int) -> np.ndarray:
    order = np.arange(array.shape[axis])
    order[[one, other]] = other, one
    return array.take(order, axis)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["layers", "rows", "columns"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_an_exchange_changes_the_checksum(dtype: Any, axis: int) -> None:
    """Sizes and distances are powers of two, for which weights 1, 2, 3, ... would lose most bits of a difference."""
    good = np.random.default_rng(0).standard_normal((16, 32, 64)).astype(dtype)
    expected = manifests.describe({"x": good}, {})
    for one, other in [(0, 1), (0, 8), (3, 7)]:
        bad = exchanged(good, axis, one, other)
        assert manifests.describe({"x": bad}, {}) != expected
        assert manifests.array_checksum(bad, (0, 0, 0)) != expected.tensors["x"].checksum


def test_an_exchange_of_ones_and_zeros_changes_the_checksum() -> None:
    """In float32 they differ only in their highest bits, and most weights would keep one or two of these."""
    good = np.random.default_rng(0).integers(0, 2, (16, 8, 8)).astype(np.float32)
    expected = manifests.describe({"x": good}, {})
    found = [
        manifests.array_checksum(exchanged(good, 0, one, other), (0, 0, 0))
        for one, other in itertools.combinations(range(16), 2)
    ]
    assert len(set(found)) == 120
    assert expected.tensors["x"].checksum not in found


@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (4, 7), (3, 6, 10)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "uint16", "int8", "bool"])
def test_the_checksums_of_parts_add_up(dtype: str, shape: tuple[int, ...]) -> None:
    whole = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    slices = [[slice(0, n // 3), slice(n // 3, n)] for n in shape]
    parts = [
        manifests.array_checksum(whole[index], [part.start for part in index]) for index in itertools.product(*slices)
    ]
    assert sum(parts) % 2**32 == manifests.array_checksum(whole, (0,) * whole.ndim)


def test_encode_and_decode() -> None:
    manifest = manifests.describe(state(1), {"a": [1, {"b": None}], "tuple": (1, 2)})
    found = manifests.decode(json.loads(json.dumps(manifests.encode(manifest))))
    assert found.tensors == manifest.tensors
    assert found.extra == {"a": [1, {"b": None}], "tuple": [1, 2]}
    assert found.tensors["params/block/~/linear/w"][:2] == ((16, 24), "float32")


def test_many_differences_are_counted() -> None:
    manifest = manifests.describe({str(n): np.zeros(2) for n in range(9)}, {})
    wanted = {str(n): jax.ShapeDtypeStruct((3,), "float64") for n in range(9)}
    with pytest.raises(UserError) as wrong:
        manifests.check_fits(manifest, wanted, part=False, where="it")
    assert str(wrong.value).count("expected (3,)") == 5
    assert "and 4 more" in str(wrong.value)
    manifests.check_fits(manifests.describe(state(1), {}), abstract(state(2)), part=False, where="it")
