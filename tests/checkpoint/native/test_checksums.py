"""Damage that only a checksum detects: exchanged layers."""

from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts
from support.array_source import ArraySource
from support.builders import TINY, program

from mesh_transformer.checkpoint.load import load
from mesh_transformer.checkpoint.native.manifest import array_checksum, describe, device_checksum, flatten
from mesh_transformer.checkpoint.native.source import NativeSource, ocdbt
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint, UpdateCounts
from mesh_transformer.errors import UserError
from mesh_transformer.train.step import TrainProgram, TrainState


@pytest.fixture(scope="module")
def run() -> TrainProgram:
    return program(TINY)


@pytest.fixture(scope="module")
def state(run: TrainProgram) -> TrainState:
    return run.init(jax.random.key(3))


def as_source(state: TrainState) -> ArraySource:
    leaves = flatten({"params": state.params, "mu": state.opt_state["mu"], "nu": state.opt_state["nu"]})
    return ArraySource({name: np.asarray(leaf) for name, leaf in leaves.items()}, UpdateCounts(0, 0, 0))


def exchange_layers(folder: str, key: str) -> None:
    """Exchange layers 1 and 2 of a tensor, with valid checksums of the file format."""
    spec = {"driver": "zarr", "kvstore": {**ocdbt(f"{folder}/state"), "path": f"{key}/"}}
    array = ts.open(spec, open=True).result()
    first, second = array[1].read().result(), array[2].read().result()
    assert (first != second).any()
    array[1].write(second).result()
    array[2].write(first).result()


def save(state: TrainState, root: Path, writer: str) -> str:
    if writer == "conversion":
        return write_native(as_source(state), str(root))
    store = CheckpointStore(str(root))
    store.save(0, state, {})
    store.close()
    return str(root / "step_0")


@pytest.mark.parametrize("writer", ["store", "conversion"])
def test_exchanged_layers_are_detected(tmp_path: Path, run: TrainProgram, state: TrainState, writer: str) -> None:
    folder = save(state, tmp_path, writer)
    exchange_layers(folder, "params.blocks.attention/q.w")
    wrong = "wrong checksum of params/blocks/attention/q/w"
    source = NativeSource(folder)
    with pytest.raises(DamagedCheckpoint, match=wrong):
        source.read("params/blocks/attention/q/w", (slice(0, 1), slice(0, 1), slice(0, 1)))
    with pytest.raises(DamagedCheckpoint, match=wrong):
        load(source, {"params": run.abstract_state.params})
    with pytest.raises(UserError, match=wrong):
        CheckpointStore(str(tmp_path), read_only=True).restore(run.abstract_state)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "int32", "bfloat16", "float32"])
def test_devices_and_numpy_compute_the_same_checksum(dtype: str) -> None:
    """Of a tensor that is split on one dimension and replicated on the other."""
    host = np.random.default_rng(0).integers(0, 100, (4, 6, 10)).astype(dtype)
    mesh = jax.make_mesh((2, 2), ("split", "replicated"), devices=jax.devices()[:4])
    array = jax.device_put(host, jax.NamedSharding(mesh, jax.P(None, "split")))
    expected = array_checksum(host, (0, 0, 0))
    assert device_checksum(array) == expected
    assert describe({"x": array}, {}).tensors["x"].checksum == expected
