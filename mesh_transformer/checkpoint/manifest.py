"""What a checkpoint says of itself: shape, dtype and checksum of each tensor, and the run's own JSON.

The checksum is the sum of a tensor's bits, as unsigned integers, modulo 2**32. Integer addition is associative, so
it does not depend on the mesh, is computed where the shards lie, and any single flipped bit changes it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.errors import UserError

SHOWN = 5  # differences named in an error message
DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64"),
}
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48


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
    leaves = flatten(state)  # one after the other: XLA for CPU makes a copy of what it sums
    specs = {name: TensorSpec(tuple(x.shape), str(x.dtype), int(_sum_bits(x))) for name, x in leaves.items()}
    return Manifest(specs, extra)


def encode(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON with its own CRC.

    Raises:
        TypeError: `extra` holds something that JSON has no form for.
    """
    body = {"tensors": {name: list(spec) for name, spec in manifest.tensors.items()}, "extra": manifest.extra}
    body = json.loads(json.dumps(body))  # what a reader gets: tuples are lists, keys are strings
    return {"crc32": _crc(body), "body": body}


def decode(document: Any) -> Manifest:
    """The inverse of `encode`, for any JSON.

    Raises:
        DamagedCheckpoint: the document is not what `encode` returned, or tells of tensors that no save writes.
    """
    try:
        body, crc = document["body"], document["crc32"]
        if crc != _crc(body):
            raise DamagedCheckpoint("the manifest's CRC is wrong")
        tensors, extra = body["tensors"], body["extra"]
        if not (isinstance(tensors, dict) and isinstance(extra, dict)):
            raise DamagedCheckpoint("the manifest's tensors and extra are no JSON objects")
        return Manifest({name: _spec(name, entry) for name, entry in tensors.items()}, extra)
    except (KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"the manifest is not one of ours: {error!r}") from error


def _spec(name: str, entry: Any) -> TensorSpec:
    """One tensor's entry, [shape, dtype, checksum]."""
    match entry:
        case [list(shape), str(dtype), int(checksum)] if (
            len(shape) <= MAX_DIMENSIONS
            and all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in shape)
            and math.prod(shape) <= MAX_ELEMENTS
            and dtype in DTYPES
            and 0 <= checksum < 2**32
        ):
            return TensorSpec(tuple(shape), dtype, checksum)
    raise DamagedCheckpoint(f"the manifest's {name[:200]}: no tensor of ours: {str(entry)[:200]}")


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


def verify(manifest: Manifest, sums: Mapping[str, int]) -> None:
    """Compare the checksums of tensors that were read.

    Raises:
        DamagedCheckpoint: a tensor is not what was saved.
    """
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


@jax.jit
def _sum_bits(x: jax.Array) -> jax.Array:
    """`sum_bits` on the devices."""
    if x.dtype == jnp.bool_:
        return jnp.sum(x, dtype=jnp.uint32)
    word = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jnp.sum(jax.lax.bitcast_convert_type(x, word), dtype=jnp.uint32)
