"""Tensors are loaded from a checkpoint onto a mesh."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.builders import TINY, program
from support.commands import free_port
from support.together import outputs_of

from mesh_transformer.checkpoint.classic.source import ClassicSource
from mesh_transformer.checkpoint.load import load
from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint, TensorInfo
from mesh_transformer.errors import UserError

GOLDEN = {
    "model": {**TINY["model"], "seq": 64},
    "data": {"batch_size": 8},
}
CHECKPOINT = "mp8/ckpt_full/step_5"
ONE = ["mesh.tp=1"]
MESHES = [
    ONE,
    ["mesh.tp=8"],
    ["mesh.fsdp=8"],
    ["mesh.fsdp=2", "mesh.tp=2"],
    ["mesh.cp=4"],
    ["mesh.dp=8", "mesh.zero1=true"],
]


def classic(original: Path, run: Any) -> ClassicSource:
    return ClassicSource(str(original / CHECKPOINT), run.config.model)


@pytest.mark.parametrize("mesh", MESHES, ids=["-".join(mesh) for mesh in MESHES])
def test_every_mesh_gets_the_values_of_the_reference_reader(original: Path, mesh: list[str]) -> None:
    run = program(GOLDEN, *mesh, devices=1 if mesh == ONE else 8)
    found = load(classic(original, run), {"params": run.abstract_state.params})["params"]
    assert jax.tree.map(lambda x: x.sharding, found) == run.state_shardings.params
    expected = golden.read_params(original / CHECKPOINT, run.config.model)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


class Counting:
    """A source that records the shapes of the slices that are read, by tensor."""

    def __init__(self, source: ClassicSource):
        self.source, self.where, self.tensors = source, source.where, dict(source.tensors)
        self.read_shapes: list[tuple[str, tuple[int, ...]]] = []

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        array = self.source.read(name, index)
        self.read_shapes.append((name, array.shape))
        return array


def test_each_slice_is_read_once_and_nothing_else(original: Path) -> None:
    run = program(GOLDEN, "mesh.tp=4", "mesh.fsdp=1", "mesh.dp=2", devices=8)
    source = Counting(classic(original, run))
    abstract = {"params": run.abstract_state.params}
    load(source, abstract)  # type: ignore[arg-type]
    # a slice is read once for all its replicas
    for name, leaf in flatten(abstract).items():
        shard = leaf.sharding.shard_shape(leaf.shape)
        slices = int(np.prod(leaf.shape)) // int(np.prod(shard))
        assert source.read_shapes.count((name, shard)) == slices, name
    assert len({name for name, _ in source.read_shapes}) == len(flatten(abstract))


@pytest.mark.parametrize("mesh", [ONE, ["mesh.fsdp=2", "mesh.tp=2"]], ids=["one device", "split"])
def test_a_large_tensor_is_read_and_cast_in_blocks(
    original: Path, monkeypatch: pytest.MonkeyPatch, mesh: list[str]
) -> None:
    run = program(GOLDEN, *mesh, devices=1 if mesh == ONE else 8)
    source = Counting(classic(original, run))
    limit = 16 << 10
    monkeypatch.setattr("mesh_transformer.checkpoint.load.BLOCK_BYTES", limit)
    abstract = run.placement.abstract(np.dtype(jnp.bfloat16))
    found = load(source, {"params": abstract})["params"]  # type: ignore[arg-type]
    assert max(math.prod(shape) for _, shape in source.read_shapes) * 4 <= limit
    expected = golden.read_params(original / CHECKPOINT, run.config.model)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found))
    assert jax.tree.map(lambda x: x.sharding, found) == run.placement.shardings
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.bfloat16)), found, expected)


def test_another_model_is_refused_before_anything_is_read(original: Path) -> None:
    run = program(GOLDEN)
    source = Counting(classic(original, run))
    source.tensors["params/embed/tokens/w"] = TensorInfo((384, 64), np.dtype(np.float32))
    del source.tensors["params/head/logits/b"]
    with pytest.raises(UserError) as wrong:
        load(source, {"params": run.abstract_state.params})  # type: ignore[arg-type]
    assert "params/embed/tokens/w: expected (512, 64) float32, found (384, 64) float32" in str(wrong.value)
    assert "params/head/logits/b: expected (512,) float32, found nothing" in str(wrong.value)
    assert source.where in str(wrong.value)
    assert source.read_shapes == []


def test_a_read_error_is_reported_as_damage(original: Path) -> None:
    run = program(GOLDEN)

    class Broken(Counting):
        def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
            raise OSError("the disk is gone")

    with pytest.raises(DamagedCheckpoint, match="the disk is gone"):
        load(Broken(classic(original, run)), {"params": run.abstract_state.params})  # type: ignore[arg-type]


PATTERN = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

def pattern(index):
    \"\"\"Numbers that cannot be compressed, the same in all layers.\"\"\"
    layers, rows, columns = (np.arange(s.start or 0, s.stop, dtype=np.uint64) for s in index)
    places = rows[:, None] * 2048 + columns
    return np.broadcast_to((places * 2654435761 % 2**32).astype(np.float32), (len(layers), *places.shape))
"""

PROCESS = (
    PATTERN
    + """
folder, reader, port, process = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
from mesh_transformer.checkpoint.native.source import NativeSource
from mesh_transformer.checkpoint.load import load, restore

def peak_mib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

sharding = NamedSharding(jax.make_mesh((8,), ("tp",)), P(None, None, "tp"))
source = NativeSource(folder)
wanted = {
    name: jax.ShapeDtypeStruct(info.shape, np.float32, sharding=sharding) for name, info in source.tensors.items()
}
small, *names = sorted(wanted)

def read(names):
    tree = {name: wanted[name] for name in names}
    return load(source, tree) if reader == "load" else restore(source, tree, part=True)

warm = read([small])  # starts threads and loads libraries before the measurement
before = peak_mib()
arrays = read(names)
grown = peak_mib() - before
mine = sum(shard.data.nbytes for x in arrays.values() for shard in x.addressable_shards) / 2**20
largest = max(x.nbytes for x in arrays.values()) / 2**20
for x in arrays.values():
    for shard in x.addressable_shards:
        assert shard.data.nbytes * 8 == x.nbytes
        index = [slice(*s.indices(n)[:2]) for s, n in zip(shard.index, x.shape)]
        np.testing.assert_array_equal(shard.data, pattern(index))
print("GROWN", grown, mine, largest, flush=True)
"""
)

SHAPES = "{n: (32 if n != 'a' else 1, 512, 2048) for n in 'abcd'}"

# as a conversion writes it
CONVERT = (
    PATTERN
    + f"""
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.tensors import UpdateCounts, TensorInfo

class Source:
    where, extra, counts = "pattern", {{}}, UpdateCounts(1)
    tensors = {{f"params/blocks/{{n}}/w": TensorInfo(s, np.dtype(np.float32)) for n, s in {SHAPES}.items()}}
    def read(self, name, index):
        return pattern(index)

write_native(Source(), sys.argv[1])
"""
)

# as a run saves it, on another mesh than the reader's
TRAIN = (
    PATTERN
    + f"""
from mesh_transformer.checkpoint.store import CheckpointStore
sharding = NamedSharding(jax.make_mesh((4,), ("fsdp",)), P(None, "fsdp", None))

def array(shape):
    whole = lambda index: tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape))
    return jax.make_array_from_callback(shape, sharding, lambda index: pattern(whole(index)))

store = CheckpointStore(sys.argv[1])
store.save(1, {{"params": {{"blocks": {{n: {{"w": array(s)}} for n, s in {SHAPES}.items()}}}}}}, {{}})
store.close()
"""
)


@pytest.mark.multiprocess
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory from /proc")
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(CONVERT, "load", id="converted-loaded"),
        pytest.param(TRAIN, "load", id="trained-loaded", marks=pytest.mark.nightly),
        pytest.param(TRAIN, "restore", id="trained-restored", marks=pytest.mark.nightly),
    ],
)
def test_two_processes_hold_their_shards_and_one_tensor(tmp_path: Path, writer: str, reader: str) -> None:
    """384 MiB in three tensors on tp8: a process holds its 192 MiB of shards and at most one tensor of 128 MiB."""
    where: Any = {"cwd": Path(__file__).resolve().parents[2], "text": True}
    subprocess.run([sys.executable, "-c", writer, str(tmp_path)], check=True, **where)
    port = str(free_port())
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "step_1"), reader, port]
    for output in outputs_of([[*command, str(n)] for n in range(2)], timeout_s=120, cwd=where["cwd"]):
        (line,) = [line for line in output.splitlines() if line.startswith("GROWN")]
        grown, mine, largest = map(float, line.split()[1:])
        assert (mine, largest) == (192, 128)
        assert grown <= mine + largest, line
