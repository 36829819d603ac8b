"""What a checkpoint says of itself: shape, dtype and checksum of each tensor, and the run's own JSON.

The checksum is the sum of a tensor's bits, as unsigned integers, modulo 2**32. Integer addition is associative, so
it does not depend on the mesh, is computed where the shards lie, and any single flipped bit changes it.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.errors import UserError

SHOWN = 5  # differences named in an error message


class DamagedCheckpoint(UserError):
    """A checkpoint cannot be read back as it was written; the message gives the reason."""


class TensorSpec(NamedTuple):
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


class Manifest(NamedTuple):
    """The tensors of a checkpoint by path (`params/wte/w`), and the caller's JSON."""

    tensors: dict[str, TensorSpec]
    extra: dict[str, Any]


def describe(state: Any, extra: dict[str, Any]) -> Manifest:
    """The manifest of `state`, a pytree of arrays; waits for the arrays. In several processes all must call it."""
    leaves = flatten(state)
    sums = _checksums(leaves, {name: str(x.dtype) for name, x in leaves.items()})
    return Manifest(
        {name: TensorSpec(tuple(x.shape), str(x.dtype), sums[name]) for name, x in leaves.items()}, extra
    )


def encode(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON with its own CRC.

    Raises:
        TypeError: `extra` holds something that JSON has no form for.
    """
    body = {"tensors": {name: list(spec) for name, spec in manifest.tensors.items()}, "extra": manifest.extra}
    body = json.loads(json.dumps(body))  # what a reader gets: tuples are lists, keys are strings
    return {"crc32": _crc(body), "body": body}


def decode(document: dict[str, Any]) -> Manifest:
    """The inverse of `encode`.

    Raises:
        DamagedCheckpoint: the document is not what `encode` returned.
    """
    try:
        body, crc = document["body"], document["crc32"]
        if crc != _crc(body):
            raise DamagedCheckpoint("the manifest's CRC is wrong")
        tensors = {name: TensorSpec(tuple(s), d, c) for name, (s, d, c) in body["tensors"].items()}
        return Manifest(tensors, body["extra"])
    except (KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"the manifest is incomplete: {error!r}") from error


def check_fits(manifest: Manifest, abstract: Any, *, part: bool, where: str, any_float: bool = False) -> None:
    """Refuse a checkpoint of another shape of model; `part`: tensors that `abstract` does not name may be there.

    A parameter may be stored in a narrower float than it is wanted in; with `any_float` every tensor in any float.

    Raises:
        UserError: a tensor is missing, superfluous or of another shape or dtype; the message names it.
    """
    wanted = flatten(abstract)
    names = list(wanted) if part else list(dict.fromkeys([*wanted, *manifest.tensors]))
    differences = []
    for name in names:
        expected = (
            TensorSpec(tuple(wanted[name].shape), str(wanted[name].dtype), 0) if name in wanted else None
        )
        found = manifest.tensors.get(name)
        if expected is None or found is None or not _fits(name, expected, found, any_float):
            differences.append(f"{name}: expected {expected or 'nothing'}, found {found or 'nothing'}")
    if differences:
        more = f"\n  and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise UserError(
            f"{where} does not fit this configuration:\n  "
            + "\n  ".join(differences[:SHOWN])
            + more
            + "\nset the model (and optimizer.moments_dtype) as the run was started, or choose another model_dir"
        )


def _fits(name: str, expected: TensorSpec, found: TensorSpec, any_float: bool) -> bool:
    if expected.shape != found.shape or expected.dtype == found.dtype:
        return expected.shape == found.shape
    stored, wanted = jnp.dtype(found.dtype), jnp.dtype(expected.dtype)
    floats = jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(wanted, jnp.floating)
    return floats and (any_float or (name.startswith("params/") and _is_wider(wanted, stored)))


def _is_wider(wide: jnp.dtype, narrow: jnp.dtype) -> bool:
    """Whether each value of one float dtype is one of the other."""
    return jnp.promote_types(wide, narrow) == wide


def verify(manifest: Manifest, state: Any) -> None:
    """Compare the checksums of restored arrays. In several processes all must call it, and all get the same result.

    Arrays that were widened are compared as they were stored, which is exact.

    Raises:
        DamagedCheckpoint: a tensor is not what was saved.
    """
    sums = _checksums(flatten(state), {name: spec.dtype for name, spec in manifest.tensors.items()})
    wrong = [name for name, value in sums.items() if value != manifest.tensors[name].checksum]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise DamagedCheckpoint(f"wrong checksum of {', '.join(wrong[:SHOWN])}{more}")


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def sum_bits(array: np.ndarray) -> int:
    """The checksum of an array, or its part of one: the parts' sums add up, modulo 2**32."""
    if array.dtype == np.bool_:
        return int(array.sum(dtype=np.uint32))
    word = {1: np.uint8, 2: np.uint16}.get(array.dtype.itemsize, np.uint32)
    return int(np.ascontiguousarray(array).view(word).sum(dtype=np.uint32))


def _crc(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _checksums(leaves: dict[str, Any], dtypes: Mapping[str, str]) -> dict[str, int]:
    """The checksums of arrays in the given dtypes. One computation for each mesh: different ones cannot share it."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, leaf in leaves.items():
        groups[_devices(leaf)].append(name)
    sums: dict[str, int] = {}
    for names in groups.values():
        values = jax.device_get(
            _sum_bits([leaves[name] for name in names], tuple(dtypes[name] for name in names))
        )
        sums.update({name: int(np.asarray(value)) for name, value in zip(names, values, strict=True)})
    return sums


def _devices(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return None
    sharding = leaf.sharding
    return (
        sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else frozenset(sharding.device_set)
    )


@functools.partial(jax.jit, static_argnums=1)
def _sum_bits(leaves: list[jax.Array], dtypes: tuple[str, ...]) -> list[jax.Array]:
    return [
        jnp.sum(_bits(x.astype(dtype)), dtype=jnp.uint32) for x, dtype in zip(leaves, dtypes, strict=True)
    ]


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    word = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
