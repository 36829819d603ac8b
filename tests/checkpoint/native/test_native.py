"""The native format read and written in slices, and its compatibility with CheckpointStore."""

import itertools
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import jax
import ml_dtypes
import numpy as np
import pytest
from support.array_source import ArraySource
from support.builders import TINY, program
from support.commands import REPO
from support.gcs_server import CUT, GcsServer

from mesh_transformer import files
from mesh_transformer.checkpoint.load import load, restore
from mesh_transformer.checkpoint.native import manifest as manifests
from mesh_transformer.checkpoint.native import source as native
from mesh_transformer.checkpoint.native import writer
from mesh_transformer.checkpoint.native.source import COMMIT_MARKER, NativeSource, blocks, chunk_shape
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint, TensorInfo, UpdateCounts
from mesh_transformer.errors import UserError
from mesh_transformer.train.step import TrainProgram, TrainState


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
        jax.random.normal(key, x.shape) if x.dtype == np.float32 else x + 5 for key, x in zip(keys, leaves, strict=True)
    ]
    return fresh._replace(step=fresh.step + 5, opt_state=jax.tree.unflatten(tree, moved))


def as_source(state: TrainState) -> ArraySource:
    """The state as a `TensorSource`."""
    adam = state.opt_state
    named = manifests.flatten({"params": state.params, "mu": adam["mu"], "nu": adam["nu"]})
    return ArraySource({name: np.asarray(x) for name, x in named.items()}, UpdateCounts(5, 5, 5), {"config": {"a": 1}})


def read_all(source) -> dict[str, np.ndarray]:
    return {name: source.read(name, (slice(None),) * len(info.shape)) for name, info in source.tensors.items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_a_saved_step_is_read_by_name(tmp_path: Path, state: TrainState) -> None:
    store = CheckpointStore(str(tmp_path))
    store.save(5, state, {"tokens": 7})
    store.close()
    source = NativeSource(str(tmp_path / "step_5"))
    assert source.counts == UpdateCounts(5, 5, 5)
    assert source.extra == {"tokens": 7}
    expected = as_source(state)
    assert_same(read_all(source), expected.arrays)
    part = (slice(1, 3), slice(7, 20), slice(0, 64))
    np.testing.assert_array_equal(source.read("nu/blocks/ff/in/w", part), expected.arrays["nu/blocks/ff/in/w"][part])


def test_a_written_step_is_restored(tmp_path: Path, run: TrainProgram, state: TrainState) -> None:
    folder = write_native(as_source(state), str(tmp_path))
    assert folder == str(tmp_path / "step_5")
    found = CheckpointStore(str(tmp_path), read_only=True).restore(run.abstract_state)
    assert found is not None
    assert (found.step, found.extra) == (5, {"config": {"a": 1}})
    jax.tree.map(np.testing.assert_array_equal, found.state, state)
    assert_same(read_all(NativeSource(folder)), as_source(state).arrays)
    # a run can resume from it
    store = CheckpointStore(str(tmp_path))
    store.save(6, found.state, {})
    store.close()
    assert store.steps() == [5, 6]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_parameters_in_half_precision_are_restored_in_float32_on_another_mesh(
    tmp_path: Path, state: TrainState, dtype
) -> None:
    source = as_source(state)
    params = {name: x.astype(dtype) for name, x in source.arrays.items() if name.startswith("params/")}
    write_native(ArraySource(params, UpdateCounts(9)), str(tmp_path))
    on = program(TINY, "mesh.tp=4", "mesh.fsdp=2", devices=8)
    wanted = {"params": on.abstract_state.params}
    source = NativeSource(str(tmp_path / "step_9"))
    for result in (restore(source, wanted, part=True), load(source, wanted)):
        arrays = manifests.flatten(result)
        assert_same({n: np.asarray(x) for n, x in arrays.items()}, {n: x.astype("f4") for n, x in params.items()})
        assert jax.tree.map(lambda x: x.sharding, result["params"]) == on.state_shardings.params
    with pytest.raises(UserError, match="opt_state/count: expected .* found nothing"):
        CheckpointStore(str(tmp_path), read_only=True).restore(on.abstract_state)


SHAPES = [(), (7,), (0, 3), (3, 5), (3, 40, 11), (2, 300, 70), (1, 1, 1), (2, 2, 90, 40)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk_bytes", [4, 200, 3000, 10**6])
def test_blocks_are_whole_chunks_and_cover_the_tensor_once(
    shape: tuple[int, ...], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(native, "WRITE_BLOCK_BYTES", 8 * chunk_bytes)
    chunk, seen = chunk_shape(TensorInfo(shape, np.dtype(np.float32))), np.zeros(shape, int)
    assert math.prod(chunk) * 4 <= chunk_bytes
    assert len(shape) < 3 or set(chunk[:-2]) == {1}
    for limit in (1, 500, 10**7):
        seen[...] = 0
        for index in blocks([range(n) for n in shape], chunk, 4, limit):
            seen[index] += 1
            assert seen[index].size * 4 <= max(math.prod(chunk) * 4, limit)
            assert all(s.start % c == 0 for s, c in zip(index, chunk, strict=True))
            assert all(s.stop % c == 0 or s.stop == n for s, c, n in zip(index, chunk, shape, strict=True))
        assert (seen == 1).all()


def test_blocks_of_a_slice() -> None:
    """Rows 3 to 9 and columns 5 to 20 in chunks of 4 x 8 overlap 3 x 3 chunks."""
    found = list(blocks([range(3, 10), range(5, 21)], (4, 8), 1, limit=96))
    assert found == [(slice(3, 4), slice(5, 21)), (slice(4, 8), slice(5, 21)), (slice(8, 10), slice(5, 21))]
    single = list(blocks([range(3, 10), range(5, 21)], (4, 8), 1, limit=1))
    assert single[:3] == [
        (slice(3, 4), slice(5, 8)),
        (slice(3, 4), slice(8, 16)),
        (slice(3, 4), slice(16, 21)),
    ]
    assert len(single) == 9


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        # columns split over eight devices
        ((28, 4096, 16384), (1, 1, 8)),
        # rows split over eight devices
        ((28, 16384, 4096), (1, 8, 1)),
        ((28, 4096, 4096), (1, 8, 1)),
        ((28, 4096, 4096), (1, 1, 8)),
        ((50432, 4096), (8, 1)),
        ((4096, 50432), (1, 8)),
    ],
)
def test_a_slice_for_one_of_eight_devices_touches_few_other_bytes(
    shape: tuple[int, ...], parts: tuple[int, ...]
) -> None:
    """For the 6B model, at most twice the bytes of the slice are read, and a row of chunks fits in one block."""
    chunk = chunk_shape(TensorInfo(shape, np.dtype(np.float32)))
    wanted = [n // p for n, p in zip(shape, parts, strict=True)]
    touched = [-(-n // c) * c for n, c in zip(wanted, chunk, strict=True)]
    assert math.prod(touched) <= 2 * math.prod(wanted)
    assert chunk[-2] * shape[-1] * 4 <= 16 << 20


def test_a_tensor_in_many_blocks(
    tmp_path: Path, run: TrainProgram, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(native, "WRITE_BLOCK_BYTES", 3000)
    write_native(as_source(state), str(tmp_path))
    found = CheckpointStore(str(tmp_path), read_only=True).restore(run.abstract_state)
    # the checksums of the blocks add up to those of the whole tensors
    assert found is not None
    jax.tree.map(np.testing.assert_array_equal, found.state.params, state.params)


def test_an_existing_step_is_not_replaced(tmp_path: Path, state: TrainState) -> None:
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5/mine").write_text("mine")
    with pytest.raises(UserError, match="step_5 exists already"):
        write_native(as_source(state), str(tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["step_5", "mine"]
    write_native(as_source(state), str(tmp_path), overwrite=True)
    assert not (tmp_path / "step_5/mine").exists()


def test_a_failing_source_leaves_nothing(tmp_path: Path, state: TrainState) -> None:
    class Broken(ArraySource):
        def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
            if name.startswith("nu/head"):
                raise DamagedCheckpoint("7.npz ends early")
            return super().read(name, index)

    whole = as_source(state)
    with pytest.raises(UserError, match="7.npz ends early"):
        write_native(Broken(whole.arrays, whole.counts), str(tmp_path / "run"))
    assert not list((tmp_path / "run").glob("*"))


def interrupt_at(number: int) -> Callable[[FrameType, str, object], object]:
    """A trace function that raises KeyboardInterrupt at a line of the writer: the first has number 0."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal left
        if frame.f_code.co_filename != writer.__file__:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return trace

    return trace


def test_ctrl_c_at_any_line_leaves_no_write_in_the_background(tmp_path: Path) -> None:
    source = ArraySource({"params/embed/tokens/w": np.ones((64, 64), np.float32)}, UpdateCounts(5, 5, 5), {})
    for number in itertools.count():
        sys.settrace(interrupt_at(number))
        try:
            write_native(source, str(tmp_path / f"out_{number}"))
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
    # a write in the background would end in this time
    time.sleep(0.5)
    assert number > 10
    assert (tmp_path / f"out_{number}/step_5" / COMMIT_MARKER).exists()
    assert not list(tmp_path.rglob("*mtj-partial*"))


def test_a_damaged_step_is_reported(tmp_path: Path, state: TrainState) -> None:
    folder = Path(write_native(as_source(state), str(tmp_path)))
    data = max((folder / "state/d").iterdir(), key=lambda path: path.stat().st_size)
    copy = shutil.copytree(folder, tmp_path / "copy")
    data.unlink()
    with pytest.raises(DamagedCheckpoint, match="step_5: .*/w: "):
        read_all(NativeSource(str(folder)))
    manifest = copy / "manifest/metadata"
    manifest.write_text(manifest.read_text()[:-40])
    with pytest.raises(DamagedCheckpoint, match="the manifest of .*copy"):
        NativeSource(str(copy))


@pytest.mark.parametrize("status", [503, CUT], ids=["503", "cut"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_bucket(gcs: GcsServer, run: TrainProgram, state: TrainState, status: int) -> None:
    gcs.fail(status, method="POST|PUT", path="state", times=2)
    write_native(as_source(state), "gs://bucket/run")
    gcs.fail(status, method="GET", path="state/", times=2)
    assert_same(read_all(NativeSource("gs://bucket/run/step_5")), as_source(state).arrays)
    store = CheckpointStore("gs://bucket/run", read_only=True)
    assert store.steps() == [5]
    found = store.restore(run.abstract_state)
    assert found is not None
    jax.tree.map(np.testing.assert_array_equal, found.state, state)
    assert [fault for fault in gcs.faults if fault.times] == []


def test_a_write_to_a_bucket_that_is_killed_before_its_marker(
    gcs: GcsServer, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: str, content: bytes) -> None:
        if path.endswith(COMMIT_MARKER):
            raise KeyboardInterrupt
        original(path, content)

    original = files.replace
    monkeypatch.setattr(files, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_native(as_source(state), "gs://bucket/run")
    assert "run/step_5/manifest/metadata" in gcs.objects("bucket")
    assert CheckpointStore("gs://bucket/run", read_only=True).steps() == []
    monkeypatch.undo()
    # the next run first completes the work of the first one
    with pytest.raises(UserError, match="step_5 exists already"):
        write_native(as_source(state), "gs://bucket/run")
    assert CheckpointStore("gs://bucket/run", read_only=True).steps() == [5]
    assert_same(read_all(NativeSource("gs://bucket/run/step_5")), as_source(state).arrays)
    write_native(as_source(state), "gs://bucket/run", overwrite=True)
    assert_same(read_all(NativeSource("gs://bucket/run/step_5")), as_source(state).arrays)
    assert {name.split("/")[1] for name in gcs.objects("bucket")} == {"step_5"}


KILLED = """
import sys, time
import numpy as np
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.tensors import UpdateCounts, TensorInfo

class Slow:
    where, extra, counts = "slow", {}, UpdateCounts(1)
    tensors = {f"params/blocks/{n}/w": TensorInfo((3, 64, 64), np.dtype(np.float32)) for n in "abcdef"}
    def read(self, name, index):
        print(name, flush=True)
        time.sleep(float(sys.argv[2]))
        return np.full([s.stop - s.start for s in index], ord(name[-3]), np.float32)

write_native(Slow(), sys.argv[1])
"""


def test_kill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """After two kills, the second one tensor later, the next run starts again and writes a complete step."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    for tensors in (2, 3):
        with subprocess.Popen([*command, "0.2"], stdout=subprocess.PIPE, text=True, cwd=REPO) as child:
            assert child.stdout is not None
            assert all(child.stdout.readline() for _ in range(tensors))
            child.kill()
        assert [path.name for path in tmp_path.iterdir()] == [".step_1.mtj-partial"]
        assert CheckpointStore(str(tmp_path), read_only=True).steps() == []
    subprocess.run([*command, "0"], check=True, cwd=REPO, stdout=subprocess.DEVNULL)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    found = read_all(NativeSource(str(tmp_path / "step_1")))
    assert found.keys() == {f"params/blocks/{n}/w" for n in "abcdef"}
    assert all((array == ord(name[-3])).all() and array.shape == (3, 64, 64) for name, array in found.items())


MEMORY = """
import ml_dtypes, numpy as np, sys
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.tensors import UpdateCounts, TensorInfo

def peak_mib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

class Zeros:
    where, extra, counts = "zeros", {}, UpdateCounts(1)
    tensors = {f"params/blocks/{n}/w": TensorInfo((4, 4096, 6144), np.dtype(ml_dtypes.bfloat16)) for n in "abc"}
    def read(self, name, index):
        return np.ones([s.stop - s.start for s in index], ml_dtypes.bfloat16)

before = peak_mib()
write_native(Zeros(), sys.argv[1])
print(peak_mib() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory from /proc")
def test_writing_holds_few_slices(tmp_path: Path) -> None:
    """576 MiB in blocks of 16 MiB: memory for two blocks and TensorStore's chunks, measured as 90 MiB."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout) < 8 * 16
    written = NativeSource(str(tmp_path / "step_1"))
    assert sum(math.prod(x.shape) * 2 for x in written.tensors.values()) == 576 << 20
