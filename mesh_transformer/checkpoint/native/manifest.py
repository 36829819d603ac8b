"""The manifest of a checkpoint: shape, dtype and checksum of each tensor, and the run's JSON.

The checksum is a weighted sum modulo 2**32: the bits of each element as an unsigned integer, times the weight of its
position. Integer addition is associative, so the sum does not depend on the mesh or the chunks, and each device sums
its own shards. A weight is the product of one pseudo-random odd number per coordinate. Multiplication by an odd number
is invertible modulo 2**32, so a change of a single element always changes the sum. An exchange of elements, rows or
layers leaves it unchanged with a probability of about 1e-8.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer.checkpoint.tensors import MAX_DIMENSIONS, MAX_ELEMENTS, DamagedCheckpoint
from mesh_transformer.errors import UserError, listed

DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64"),
}
# the kind of the checksums, as a manifest names it
WEIGHTED = "weighted"
# tensors that a message names
_MOST_DIFFERENCES = 5


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
    """The manifest of `state`, a pytree of arrays. Waits for the arrays. All processes must call it."""
    leaves = flatten(state)
    sums = _checksums(list(leaves.values()))
    specs = (TensorSpec(tuple(x.shape), str(x.dtype), total) for x, total in zip(leaves.values(), sums, strict=True))
    return Manifest(dict(zip(leaves, specs, strict=True)), extra)


def encode(manifest: Manifest) -> dict[str, Any]:
    """The manifest as a JSON document with its CRC.

    Raises:
        TypeError: `extra` holds a value that JSON cannot represent.
    """
    tensors = {name: list(spec) for name, spec in manifest.tensors.items()}
    body = {"tensors": tensors, "extra": manifest.extra, "checksums": WEIGHTED}
    # as a reader parses it: tuples become lists, keys become strings
    body = json.loads(json.dumps(body))
    return {"crc32": _crc(body), "body": body}


def decode(document: Any) -> Manifest:
    """The inverse of `encode`, for any JSON.

    Raises:
        DamagedCheckpoint: the document is damaged, or describes tensors that no save writes.
    """
    try:
        body, crc = document["body"], document["crc32"]
        if crc != _crc(body):
            raise DamagedCheckpoint("the manifest's CRC is wrong")
        tensors, extra, kind = body["tensors"], body["extra"], body.get("checksums")
        if not (isinstance(tensors, dict) and isinstance(extra, dict)):
            raise DamagedCheckpoint("the manifest's tensors or extra is not a JSON object")
        if kind != WEIGHTED:
            raise DamagedCheckpoint(
                f"the manifest's checksums are of kind {kind!r:.60}: another version may have written it"
            )
        return Manifest({name: _spec(name, entry) for name, entry in tensors.items()}, extra)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"the manifest is not one of this program: {error!r}") from error


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
    raise DamagedCheckpoint(f"the manifest's entry {name[:200]} describes no tensor: {str(entry)[:200]}")


def check_fits(manifest: Manifest, abstract: Any, *, part: bool, where: str, any_float: bool = False) -> None:
    """Refuse a checkpoint whose tensors do not match `abstract`.

    Args:
        part: whether the checkpoint may hold tensors that `abstract` does not name.
        any_float: accept any float dtype for every tensor. Without it, only a parameter may be stored in another dtype:
            a float without more precision or range than the requested one.

    Raises:
        UserError: a tensor is missing, unexpected, or has another shape or dtype; the message names it.
    """
    if wrong := differences(manifest, abstract, part=part, any_float=any_float):
        raise UserError(
            f"{where} does not match this config:",
            *wrong,
            "set the groups model and optimizer as at the start of the run, or choose another checkpoint.model_dir",
        )


def differences(manifest: Manifest, abstract: Any, *, part: bool, any_float: bool = False) -> list[str]:
    """What `check_fits` refuses, one line for each of the first tensors; empty if all match."""
    requested = {name: TensorSpec(tuple(x.shape), str(x.dtype), 0) for name, x in flatten(abstract).items()}
    names = list(requested) if part else list(dict.fromkeys([*requested, *manifest.tensors]))
    wrong = []
    for name in names:
        expected, found = requested.get(name), manifest.tensors.get(name)
        if expected is None or found is None or not _fits(name, expected, found, any_float):
            wrong.append(f"  {name}: expected {expected or 'nothing'}, found {found or 'nothing'}")
    more = len(wrong) - _MOST_DIFFERENCES
    return [*wrong[:_MOST_DIFFERENCES], *([f"  and {more} more"] if more > 0 else [])]


def _fits(name: str, expected: TensorSpec, found: TensorSpec, any_float: bool) -> bool:
    if expected.shape != found.shape or expected.dtype == found.dtype:
        return expected.shape == found.shape
    stored, requested = jnp.dtype(found.dtype), jnp.dtype(expected.dtype)
    if not (jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(requested, jnp.floating)):
        return False
    return any_float or (name.startswith("params/") and np.can_cast(stored, requested))


def verify(manifest: Manifest, sums: Mapping[str, int]) -> None:
    """Compare the checksums of tensors that were read with the manifest's.

    Raises:
        DamagedCheckpoint: a checksum is wrong.
    """
    wrong = [name for name, value in sums.items() if value != manifest.tensors[name].checksum]
    if wrong:
        raise DamagedCheckpoint(f"wrong checksum of {listed(wrong)}")


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def array_checksum(array: np.ndarray, start: Sequence[int]) -> int:
    """The checksum of the part of a tensor that begins at `start`. Checksums of parts add up modulo 2**32."""
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    words = np.asarray(array, order="C")[..., None].view(_word_dtype(array.dtype))
    total = words.sum(-1, dtype=np.uint32) if array.dtype.itemsize > 4 else words[..., 0]
    # In float32 values with few mantissa bits the low bits are zero, but only low bits affect all bits of the sum.
    total = total ^ (total >> 16)
    for dimension in reversed(range(array.ndim)):
        weights = _weights(dimension, start[dimension], array.shape[dimension])
        total = np.einsum("...i,i->...", total, weights, dtype=np.uint32)
    return int(total)


def _crc(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _word_dtype(dtype: np.dtype) -> np.dtype:
    """The unsigned integer dtype for the bits of an element. Elements of eight bytes are two words, which are added."""
    return np.dtype(f"u{min(dtype.itemsize, 4)}")


def _weights(dimension: int, start: int, size: int) -> np.ndarray:
    """The factors (size,), odd uint32, of the coordinates from `start` on: MurmurHash3's finalizer of each."""
    h: np.ndarray = (np.arange(start, start + size) + (dimension + 1) * 0x9E3779B9).astype(np.uint32)
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return (h ^ (h >> 16)) | np.uint32(1)


def _checksums(leaves: list[Any]) -> list[int]:
    """The checksums of whole tensors. On CPU, numpy is faster than XLA and compiles nothing."""
    # one tensor at a time, because XLA needs memory for a copy of it
    if not all(isinstance(x, jax.Array) and all(d.platform == "cpu" for d in x.devices()) for x in leaves):
        return [device_checksum(x) for x in leaves]
    local = np.array([_sum_of_shards(x) for x in leaves], np.uint32)
    return multihost_utils.process_allgather(local).reshape(-1, len(local)).sum(axis=0, dtype=np.uint32).tolist()


def _sum_of_shards(x: jax.Array) -> int:
    """This process's part of a checksum: the sum of its shards, and of replicated shards the sum of one replica."""
    shards = (shard for shard in x.addressable_shards if shard.replica_id == 0)
    sums = (array_checksum(np.asarray(shard.data), [cut.start or 0 for cut in shard.index]) for shard in shards)
    return sum(sums) % 2**32


def device_checksum(x: jax.Array) -> int:
    """`array_checksum` of a whole tensor, computed on its devices."""
    return int(_weighted_sum(x, [_weights(dimension, 0, size) for dimension, size in enumerate(x.shape)]))


@jax.jit
def _weighted_sum(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    word = _word_dtype(x.dtype)
    bits = x if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, word)
    total = bits.astype(jnp.uint32) if bits.ndim == x.ndim else jnp.sum(bits, -1, dtype=jnp.uint32)
    total ^= total >> 16
    for dimension, factors in enumerate(weights):
        total *= jax.lax.broadcast_in_dim(factors, x.shape, [dimension])
    return jnp.sum(total, dtype=jnp.uint32)
