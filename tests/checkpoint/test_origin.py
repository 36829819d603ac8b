"""The files of a Hugging Face folder that each step of a run keeps."""

import random
from pathlib import Path

import numpy as np
import pytest
from support.gcs_server import GcsServer
from support.states import abstract, state

from mesh_transformer import files
from mesh_transformer.checkpoint import origin
from mesh_transformer.checkpoint.format import Folder
from mesh_transformer.checkpoint.native.format import NativeStep
from mesh_transformer.checkpoint.origin import Origin, read_files, read_origin
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.errors import UserError

ORIGIN = Origin(
    {"config.json": b'{"a": 1}', "tokenizer.json": random.Random(0).randbytes(100_000)}, np.dtype(np.float16)
)


def runs(root: str) -> None:
    """Steps 1 and 2, then another process that resumes and saves step 3."""
    first = CheckpointStore(root)
    for step in (1, 2):
        first.save(step, state(step), {"seen": step}, ORIGIN)
    first.close()
    second = CheckpointStore(root)
    found = second.restore(abstract(state(0)))
    assert found is not None
    assert found.extra["seen"] == 2
    second.save(3, state(3), {}, read_origin(second.folder(2), found.extra))
    second.close()
    assert second.steps() == [2, 3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("place", ["local", "bucket"])
def test_the_last_step_keeps_the_files(gcs: GcsServer, tmp_path: Path, place: str) -> None:
    root = "gs://bucket/run" if place == "bucket" else str(tmp_path / "run")
    runs(root)
    step = NativeStep.find(Folder(root))
    assert step is not None
    assert step.hf_folder is not None
    assert step.hf_folder.path == files.join(root, "step_3", "hf")
    assert read_files(step.hf_folder.path) == ORIGIN.files


def test_the_remains_of_a_save_are_deleted(gcs: GcsServer) -> None:
    runs("gs://bucket/run")
    gcs.delete("bucket", "run/step_3/commit_success.txt")
    assert "run/step_3/hf/config.json" in gcs.objects("bucket")
    CheckpointStore("gs://bucket/run").close()
    assert not [name for name in gcs.objects("bucket") if name.startswith("run/step_3/")]


@pytest.mark.parametrize(
    ("recorded", "dtype"),
    [({"dtype": "bfloat16"}, "bfloat16"), ({"dtype": "int8"}, None), ({"dtype": {}}, None), ("x", None)],
)
def test_a_manifest_is_data(tmp_path: Path, recorded: object, dtype: str | None) -> None:
    origin.write_files(ORIGIN.files, str(tmp_path / "hf"))
    found = read_origin(str(tmp_path), {"origin": recorded})
    assert found is not None
    assert found.files == ORIGIN.files
    assert (None if found.dtype is None else str(found.dtype)) == dtype


def test_a_folder_without_config_json_is_none(tmp_path: Path) -> None:
    origin.write_files({"tokenizer.json": b""}, str(tmp_path / "hf"))
    assert read_origin(str(tmp_path), {}) is None
    assert read_origin(str(tmp_path / "nothing"), {}) is None


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    origin.write_files(ORIGIN.files, str(tmp_path))
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(origin.MAX_FILE_BYTES + 1)
    with pytest.raises(UserError, match=r"tokenizer\.json has 134217729 bytes: at most 134217728"):
        read_files(str(tmp_path))
