"""Small states on meshes, and comparisons of states, for the tests of checkpoints."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.checkpoint.load import restore
from mesh_transformer.checkpoint.native.source import NativeSource


class State(NamedTuple):
    """A tree like a training state: nested dicts, three dtypes, scalars."""

    params: dict[str, Any]
    moments: dict[str, Any]
    step: Any


def mesh(dp: int = 1, tp: int = 1) -> Mesh:
    """The first dp * tp devices of all processes."""
    return Mesh(np.array(jax.devices()[: dp * tp]).reshape(dp, tp), ("dp", "tp"))


def shardings(on: Mesh, *, rows: str | None = None, columns: str | None = None) -> State:
    """Shardings that split matrices by rows and columns over mesh axes and replicate the rest."""
    matrix, rest = NamedSharding(on, P(rows, columns)), NamedSharding(on, P())
    return State({"block/~/linear": {"w": matrix, "b": rest}, "scale": rest}, {"w": matrix}, rest)


def tp8() -> State:
    """Shardings that split columns over eight devices."""
    return shardings(mesh(tp=8), columns="tp")


def state(seed: int, on: State | None = None, width: int = 24) -> State:
    """A state of random numbers with the given shardings."""
    random = np.random.default_rng(seed)
    host = State(
        {
            "block/~/linear": {
                "w": random.standard_normal((16, width), np.float32),
                "b": random.standard_normal(width).astype(jnp.bfloat16),
            },
            "scale": np.float32(seed),
        },
        {"w": random.standard_normal((16, width)).astype(jnp.bfloat16)},
        np.int32(seed),
    )
    return jax.tree.map(_put, host, on or tp8())


def _put(value: Any, sharding: NamedSharding) -> jax.Array:
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def read_part(folder: str, part: Any) -> Any:
    """The tensors of a step folder that `part` names."""
    return restore(NativeSource(folder), part, part=True)


def abstract(of: Any, on: Any = None) -> Any:
    """The argument of `restore`: shapes and dtypes of `of`, with the shardings `on` (default: those of `of`)."""
    on = on or jax.tree.map(lambda x: x.sharding, of)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), of, on)


def assert_equal(found: Any, expected: Any) -> None:
    """Assert equal structure, dtypes and bits in every shard of this process."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert local(x) == local(y)


def local(x: jax.Array) -> bytes:
    """The bits of an array, or of the part of it on this process."""
    if x.is_fully_addressable:
        return np.asarray(x).tobytes()
    return b"".join(np.asarray(shard.data).tobytes() for shard in x.addressable_shards)
