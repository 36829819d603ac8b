"""The native form read and written in slices, and its agreement with CheckpointStore."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from builders import TINY, program
from gcs_server import CUT, GcsServer

from mesh_transformer.checkpoint import manifest as manifests
from mesh_transformer.checkpoint.manifest import DamagedCheckpoint
from mesh_transformer.checkpoint.native import NativeSource
from mesh_transformer.checkpoint.native_writer import chunk_shape, slices, write_native
from mesh_transformer.checkpoint.place import place
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.checkpoint.tensors import Counts, TensorInfo
from mesh_transformer.errors import UserError
from mesh_transformer.train.step import TrainProgram, TrainState

HERE = Path(__file__).parent


class ArraySource:
    """Arrays in memory as a checkpoint, in the dtypes that they have."""

    where, extra = "memory", {"config": {"a": 1}}

    def __init__(self, arrays: dict[str, np.ndarray], counts: Counts):
        self.arrays, self.counts = arrays, counts
        self.tensors = {name: TensorInfo(x.shape, x.dtype) for name, x in arrays.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self.arrays[name][index]


@pytest.fixture(scope="module")
def run() -> TrainProgram:
    return program(TINY)


@pytest.fixture(scope="module")
def state(run: TrainProgram) -> TrainState:
    """A state with moments and counts that are not zero."""
    fresh = run.init(jax.random.key(3))
    leaves, tree = jax.tree.flatten(fresh.opt_state)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    moved = [
        jax.random.normal(key, x.shape) if x.dtype == np.float32 else x + 5
        for key, x in zip(keys, leaves, strict=True)
    ]
    return fresh._replace(step=fresh.step + 5, opt_state=jax.tree.unflatten(tree, moved))


def ours(state: TrainState) -> ArraySource:
    """The state under the names that all forms share."""
    adam = state.opt_state[1]
    named = manifests.flatten({"params": state.params, "mu": adam.mu, "nu": adam.nu})
    return ArraySource({name: np.asarray(x) for name, x in named.items()}, Counts(5, 5, 5))


def everything(source) -> dict[str, np.ndarray]:
    return {
        name: source.read(name, (slice(None),) * len(info.shape)) for name, info in source.tensors.items()
    }


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_what_the_store_saved_is_read_by_name(tmp_path: Path, state: TrainState) -> None:
    store = CheckpointStore(str(tmp_path))
    store.save(5, state, {"tokens": 7})
    store.close()
    source = NativeSource(str(tmp_path / "step_5"))
    assert source.counts == Counts(5, 5, 5)
    assert source.extra == {"tokens": 7}
    expected = ours(state)
    assert_same(everything(source), expected.arrays)
    part = (slice(1, 3), slice(7, 20), slice(0, 64))
    np.testing.assert_array_equal(
        source.read("nu/blocks/ff/in/w", part), expected.arrays["nu/blocks/ff/in/w"][part]
    )


def test_what_is_written_is_restored_whole(tmp_path: Path, run: TrainProgram, state: TrainState) -> None:
    folder = write_native(ours(state), str(tmp_path))
    assert folder == str(tmp_path / "step_5")
    found = CheckpointStore(str(tmp_path), read_only=True).restore(run.abstract_state)
    assert found is not None
    assert (found.step, found.extra) == (5, {"config": {"a": 1}})
    jax.tree.map(np.testing.assert_array_equal, found.state, state)
    assert_same(everything(NativeSource(folder)), ours(state).arrays)
    store = CheckpointStore(str(tmp_path))  # and a run goes on from it
    store.save(6, found.state, {})
    store.close()
    assert store.steps() == [6]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_a_slim_one_is_restored_in_float32_on_another_mesh(tmp_path: Path, state: TrainState, dtype) -> None:
    source = ours(state)
    params = {name: x.astype(dtype) for name, x in source.arrays.items() if name.startswith("params/")}
    write_native(ArraySource(params, Counts(9)), str(tmp_path))
    on = program(TINY, "mesh.tp=4", "mesh.fsdp=2", devices=8)
    wanted = {"params": on.abstract_state.params}
    found = CheckpointStore(str(tmp_path), read_only=True).restore_part(wanted)
    placed = place(NativeSource(str(tmp_path / "step_9")), wanted)
    assert found is not None
    for result in (found.state, placed):
        arrays = manifests.flatten(result)
        assert_same(
            {n: np.asarray(x) for n, x in arrays.items()}, {n: x.astype("f4") for n, x in params.items()}
        )
        assert jax.tree.map(lambda x: x.sharding, result["params"]) == on.state_shardings.params
    with pytest.raises(UserError, match="opt_state/1/count: expected .* found nothing"):
        CheckpointStore(str(tmp_path), read_only=True).restore(on.abstract_state)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (3, 40, 11), (2, 300, 70), (1, 1, 1)])
@pytest.mark.parametrize("limit", [4, 200, 3000, 10**6])
def test_slices_are_whole_chunks_and_cover_the_tensor_once(shape: tuple[int, ...], limit: int) -> None:
    info = TensorInfo(shape, np.dtype(np.float32))
    seen = np.zeros(shape, int)
    for index in slices(info, limit):
        seen[index] += 1
        assert seen[index].size * 4 <= max(4, limit)
        assert all(s.start % c == 0 for s, c in zip(index, chunk_shape(info, limit), strict=True))
    assert (seen == 1).all()


def test_a_tensor_in_many_slices(
    tmp_path: Path, run: TrainProgram, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh_transformer.checkpoint.native_writer.CHUNK_BYTES", 1000)
    write_native(ours(state), str(tmp_path))
    found = CheckpointStore(str(tmp_path), read_only=True).restore(run.abstract_state)
    assert found is not None  # its checksums were those of the whole tensors
    jax.tree.map(np.testing.assert_array_equal, found.state.params, state.params)


def test_a_target_that_is_there_stays(tmp_path: Path, state: TrainState) -> None:
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5/mine").write_text("mine")
    with pytest.raises(UserError, match="step_5 is there already"):
        write_native(ours(state), str(tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["step_5", "mine"]
    write_native(ours(state), str(tmp_path), overwrite=True)
    assert not (tmp_path / "step_5/mine").exists()


def test_a_source_that_breaks_leaves_nothing(tmp_path: Path, state: TrainState) -> None:
    class Broken(ArraySource):
        def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
            if name.startswith("nu/head"):
                raise DamagedCheckpoint("7.npz ends early")
            return super().read(name, index)

    whole = ours(state)
    with pytest.raises(UserError, match="7.npz ends early"):
        write_native(Broken(whole.arrays, whole.counts), str(tmp_path / "run"))
    assert not list((tmp_path / "run").glob("*"))


def test_a_damaged_step_is_told(tmp_path: Path, state: TrainState) -> None:
    folder = Path(write_native(ours(state), str(tmp_path)))
    data = max((folder / "state/d").iterdir(), key=lambda path: path.stat().st_size)
    copy = shutil.copytree(folder, tmp_path / "copy")
    data.unlink()
    with pytest.raises(DamagedCheckpoint, match="step_5: .*/w: "):
        everything(NativeSource(str(folder)))
    manifest = copy / "manifest/metadata"
    manifest.write_text(manifest.read_text()[:-40])
    with pytest.raises(DamagedCheckpoint, match="the manifest of .*copy"):
        NativeSource(str(copy))


@pytest.mark.parametrize("status", [503, CUT], ids=["503", "cut"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_bucket(gcs: GcsServer, run: TrainProgram, state: TrainState, status: int) -> None:
    gcs.fail(status, method="POST|PUT", path="state", times=2)
    write_native(ours(state), "gs://bucket/run")
    gcs.fail(status, method="GET", path="state/", times=2)
    assert_same(everything(NativeSource("gs://bucket/run/step_5")), ours(state).arrays)
    store = CheckpointStore("gs://bucket/run", read_only=True)
    assert store.steps() == [5]
    found = store.restore(run.abstract_state)
    assert found is not None
    jax.tree.map(np.testing.assert_array_equal, found.state, state)
    assert [fault for fault in gcs.faults if fault.times] == []


MEMORY = """
import ml_dtypes, numpy as np, sys
from mesh_transformer.checkpoint.native_writer import write_native
from mesh_transformer.checkpoint.tensors import Counts, TensorInfo

def peak_mib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

class Zeros:
    where, extra, counts = "zeros", {}, Counts(1)
    tensors = {f"params/blocks/{n}/w": TensorInfo((4, 4096, 6144), np.dtype(ml_dtypes.bfloat16)) for n in "abc"}
    def read(self, name, index):
        return np.ones([s.stop - s.start for s in index], ml_dtypes.bfloat16)

before = peak_mib()
write_native(Zeros(), sys.argv[1])
print(peak_mib() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells of memory")
def test_writing_holds_few_slices(tmp_path: Path) -> None:
    """576 MiB in slices of 48 MiB: two are held at a time, one more is in the writing of a chunk; measured 150 MiB."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout) < 5 * 48
    written = NativeSource(str(tmp_path / "step_1"))
    assert sum(math.prod(x.shape) * 2 for x in written.tensors.values()) == 576 << 20
