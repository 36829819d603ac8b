"""Damaged checkpoints: the store falls back to an earlier step."""

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.states import abstract, assert_equal, state

from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.errors import UserError

# Orbax reads all tensors at once and drops the errors after the first
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A run with finished steps 1 and 2."""
    store = CheckpointStore(str(tmp_path), keep_latest=3)
    for step in (1, 2):
        store.save(step, state(step, width=512), {"seen": step})
    store.close()
    yield tmp_path
    # reports errors of deleted objects in this test
    gc.collect()


def biggest(folder: Path) -> Path:
    """The largest file, which holds the bytes of the tensors."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def widen(path: Path) -> None:
    """A manifest with another shape, which must not count as another config."""
    path.write_text(path.read_text().replace("512", "516"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty folder": lambda step: (shutil.rmtree(step), step.mkdir()),
    "no manifest": lambda step: (step / "manifest/metadata").unlink(),
    "cut manifest": lambda step: truncate(step / "manifest/metadata"),
    "changed manifest": lambda step: widen(step / "manifest/metadata"),
    "manifest of something else": lambda step: (step / "manifest/metadata").write_text('{"a": 1}'),
    "no state": lambda step: shutil.rmtree(step / "state"),
    "no tensors": lambda step: shutil.rmtree(step / "state/ocdbt.process_0"),
    "no index": lambda step: (step / "state/manifest.ocdbt").unlink(),
    "cut index": lambda step: truncate(step / "state/manifest.ocdbt"),
    "cut tensors": lambda step: truncate(biggest(step)),
    "no tensor file": lambda step: biggest(step).unlink(),
    "a flipped bit": lambda step: flip(biggest(step)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=[name.replace(" ", "-") for name in DAMAGES])
def test_restore_falls_back_to_the_previous_step(
    root: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    damage(root / "step_2")
    store = CheckpointStore(str(root), keep_latest=3)
    wanted = abstract(state(0, width=512))
    found = store.restore(wanted)
    assert found is not None
    assert (found.step, found.extra) == (1, {"seen": 1})
    assert_equal(found.state, state(1, width=512))
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("mesh_transformer")]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"checkpoint step 2 in {root} is damaged and skipped: ")
    assert len(warnings[0].split("skipped: ")[1]) > 10
    # training does step 2 again
    store.save(2, state(20, width=512), {"again": True})
    again = store.restore(wanted)
    assert again is not None
    assert (again.step, again.extra) == (2, {"again": True})
    assert_equal(again.state, state(20, width=512))
    assert store.steps() == [1, 2]
    assert (root / "set_aside" / "step_2").is_dir()
    assert f"checkpoint step 2 in {root} is damaged: moved to {root}/set_aside/step_2" in caplog.messages
    store.close()


@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_files_that_only_orbax_reads_are_not_needed(root: Path, damage: Callable[[Path], object]) -> None:
    for name in ("_METADATA", "_sharding"):
        damage(root / "step_2/state" / name)
    found = CheckpointStore(str(root), read_only=True).restore(abstract(state(0, width=512)))
    assert found is not None
    assert found.step == 2
    assert_equal(found.state, state(2, width=512))


def test_damage_of_other_steps_does_not_matter(root: Path) -> None:
    shutil.rmtree(root / "step_1")
    found = CheckpointStore(str(root), read_only=True).restore(abstract(state(0, width=512)))
    assert found is not None
    assert found.step == 2


def test_without_an_intact_step_the_error_lists_all(root: Path) -> None:
    (root / "step_1/manifest/metadata").unlink()
    flip(biggest(root / "step_2"))
    with pytest.raises(UserError, match=r"(?s)step 2: wrong checksum of .*/w.*\n  step 1: .*no such file"):
        CheckpointStore(str(root), read_only=True).restore(abstract(state(0, width=512)))


def test_remains_of_an_interrupted_save_are_deleted_by_the_next_writer_only(root: Path) -> None:
    remains = root / "step_3.orbax-checkpoint-tmp"
    shutil.copytree(root / "step_2", remains)
    reader = CheckpointStore(str(root), read_only=True)
    assert reader.steps() == [1, 2]
    assert reader.restore(abstract(state(0, width=512))).step == 2  # type: ignore[union-attr]
    assert remains.exists()
    CheckpointStore(str(root)).close()
    assert not remains.exists()
    assert reader.steps() == [1, 2]


def test_a_save_of_an_earlier_step_sets_abandoned_steps_aside(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A log line says why each of them is moved. A whole step that is saved again is no reason to warn."""
    caplog.set_level("INFO", "mesh_transformer")
    store = CheckpointStore(str(root), keep_latest=1)
    # in the second round the name exists in set_aside/
    for n in range(2):
        store.save(2, state(n, width=512), {"n": n})
        store.wait()
    store.save(1, state(9, width=512), {})
    store.close()
    assert store.steps() == [1]
    assert sorted(os.listdir(root / "set_aside")) == ["step_2", "step_2.1", "step_2.2"]
    aside, where = root / "set_aside", f"checkpoint step 2 in {root} is"
    assert [(record.levelname, record.getMessage()) for record in caplog.records if "moved to" in record.message] == [
        ("INFO", f"{where} replaced by a newer save of this step: moved to {aside}/step_2"),
        ("INFO", f"{where} replaced by a newer save of this step: moved to {aside}/step_2.1"),
        ("WARNING", f"{where} newer than step 1, which is saved now: moved to {aside}/step_2.2"),
    ]
    moved = CheckpointStore(str(root), read_only=True)
    shutil.move(root / "set_aside" / "step_2", root / "step_2")
    assert moved.restore(abstract(state(0, width=512))).extra == {"seen": 2}  # type: ignore[union-attr]


def test_a_damaged_step_does_not_count_as_kept(root: Path) -> None:
    """With keep_latest=2, a fall-back from step 2 to 1 and a save of 3, the kept steps are 1 and 3."""
    flip(biggest(root / "step_2"))
    store = CheckpointStore(str(root), keep_latest=2)
    restored = store.restore(abstract(state(0, width=512)))
    assert restored is not None
    assert restored.step == 1
    store.save(3, state(3, width=512), {})
    store.close()
    assert store.steps() == [1, 3]
    assert (root / "set_aside/step_2").is_dir()
