"""Detection of a format by the contents of a folder, and classic and native steps in one folder."""

import json
import re
import shutil
from pathlib import Path

import pytest
from support.gcs_server import GcsServer
from support.states import abstract, assert_equal, state

from mesh_transformer.checkpoint.classic.format import classic_run
from mesh_transformer.checkpoint.classic.source import ClassicSource
from mesh_transformer.checkpoint.native.source import NativeSource
from mesh_transformer.checkpoint.open import Checkpoint, check_only_step
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import load_config
from mesh_transformer.data.records.sources import find_source
from mesh_transformer.errors import UserError


def touch(*paths: Path, text: str = "{}") -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def native(root: Path | str, *steps: int) -> None:
    store = CheckpointStore(str(root), keep_latest=9)
    for step in steps:
        store.save(step, state(step), {})
    store.close()


def recognized(path: Path | str) -> tuple[str, str]:
    """The format of a checkpoint, and its own folder."""
    checkpoint = Checkpoint.open(str(path))
    return checkpoint.format, checkpoint.folder


def test_native_folders(tmp_path: Path) -> None:
    native(tmp_path / "run", 2, 10)
    touch(tmp_path / "run/step_11.orbax-checkpoint-tmp/x", tmp_path / "run/step_x/state/y")
    for path in ("run", "run/", "run/step_10"):
        assert recognized(f"{tmp_path}/{path}") == ("native", str(tmp_path / "run/step_10"))
    assert recognized(tmp_path / "run/step_2")[1].endswith("step_2")


def test_classic_folders(tmp_path: Path) -> None:
    touch(*(tmp_path / f"run/step_{n}/shard_0/0.npz" for n in (2, 9, 10)))
    for path, step in (("run", 10), ("run/step_2", 2), ("run/step_9/", 9)):
        assert recognized(f"{tmp_path}/{path}") == ("classic", str(tmp_path / f"run/step_{step}"))
    touch(tmp_path / "run/meta.json", text='{"step": 9, "checkpoints": [2, 9], "aux": {"9": {"a": 1}}}')
    # step 10 was not finished
    assert recognized(tmp_path / "run")[1].endswith("step_9")
    assert classic_run(str(tmp_path / "run")) == (str(tmp_path / "run/step_9"), {"a": 1})


def test_hugging_face_folders(tmp_path: Path) -> None:
    for name in (
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ):
        touch(tmp_path / name / name)
        with pytest.raises(UserError, match="no config.json: put config.json into"):
            recognized(tmp_path / name)
        touch(tmp_path / name / "config.json")
        assert recognized(tmp_path / name) == ("Hugging Face", str(tmp_path / name))


def test_folders_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint in .*absent: expected the folder of a run .* found nothing"):
        recognized(tmp_path / "absent")
    touch(*(tmp_path / f"texts/{i}.txt" for i in range(12)), tmp_path / "texts/config.json")
    with pytest.raises(UserError, match=r"found 0.txt, 1.txt, .* and 5 more"):
        recognized(tmp_path / "texts")
    touch(tmp_path / "v2/params/shard_0.npz", tmp_path / "v2/meta.json")
    with pytest.raises(UserError, match="unreleased V2 model"):
        recognized(tmp_path / "v2")


def test_a_step_that_does_not_exist_names_the_steps_that_do(tmp_path: Path) -> None:
    native(str(tmp_path / "run"), 1, 20)
    with pytest.raises(UserError, match=r"^no step_999 in .*/run: it has step_1, step_20$"):
        recognized(tmp_path / "run/step_999")


def test_a_relative_path_that_does_not_exist_names_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = re.escape(f" (the current folder is {tmp_path})")
    with pytest.raises(UserError, match=f"^no checkpoint in runs/x{here}: expected"):
        recognized("runs/x")
    with pytest.raises(UserError, match=f"^data set not found, tried x.txt and data/x.txt{here}: give"):
        find_source("x.txt")
    with pytest.raises(UserError, match=f"^no such file: x.json{here}$"):
        load_config("x.json")


def test_unfinished_steps_in_a_bucket_are_ignored(gcs: GcsServer) -> None:
    native("gs://bucket/run", 1, 2)
    gcs.delete("bucket", "run/step_2/commit_success.txt")
    assert recognized("gs://bucket/run") == ("native", "gs://bucket/run/step_1")
    gcs.put("bucket", "old/step_4/shard_0/0.npz", b"")
    assert recognized("gs://bucket/old") == ("classic", "gs://bucket/old/step_4")
    with pytest.raises(UserError, match="no checkpoint in gs://bucket/none"):
        recognized("gs://bucket/none")


def test_the_format_selects_the_reader(tmp_path: Path, original: Path) -> None:
    model = load_config(str(original / "configs/tiny_mp8.json")).model
    native(tmp_path, 3)
    assert isinstance(Checkpoint.open(str(tmp_path)).source(model), NativeSource)
    assert isinstance(Checkpoint.open(str(original / "mp8/ckpt_full")).source(model), ClassicSource)


@pytest.mark.parametrize("remote", [False, True], ids=["local", "bucket"])
def test_saves_of_native_steps_keep_classic_steps(tmp_path: Path, gcs: GcsServer, remote: bool) -> None:
    root = "gs://bucket/run" if remote else str(tmp_path)
    names = [f"step_{n}/shard_0/0.npz" for n in (1, 3, 7, 10)] + ["meta.json"]
    for name in names:
        gcs.put("bucket", f"run/{name}", b"2021") if remote else touch(tmp_path / name, text="2021")
    store = CheckpointStore(root, keep_latest=1)
    assert store.steps() == []
    # step 7 exists as a classic step, which is set aside
    for step in (4, 5, 7):
        store.save(step, state(step), {})
    store.close()
    found = CheckpointStore(root, keep_latest=1).restore(abstract(state(0)))
    assert found is not None
    assert_equal(found.state, state(7))
    assert store.steps() == [7]
    assert recognized(root)[0] == "native"

    def exists(name: str) -> bool:
        return f"run/{name}" in gcs.objects("bucket") if remote else (tmp_path / name).exists()

    kept = [name.replace("step_7", "set_aside/step_7") for name in names]
    assert all(exists(name) for name in kept)


def test_a_classic_run_without_its_meta_json(tmp_path: Path, original: Path) -> None:
    shutil.copytree(original / "mp1/ckpt_params/step_5", tmp_path / "step_5")
    with pytest.raises(UserError, match="not its meta.json"):
        classic_run(str(tmp_path))
    (tmp_path / "meta.json").write_text(json.dumps({"step": 6, "checkpoints": [5, 6], "aux": {}}))
    with pytest.raises(UserError, match="step 6"):
        classic_run(str(tmp_path))
    assert classic_run(str(tmp_path / "elsewhere")) is None


@pytest.mark.parametrize("name", ["step_4", "step_60"])
@pytest.mark.parametrize("format", ["native", "classic"])
def test_a_root_with_other_steps_is_refused(tmp_path: Path, name: str, format: str) -> None:
    """A reader of the root would use step 60, and a run would delete step 4."""
    for folder in {"native": ("state", "manifest"), "classic": ("shard_0",)}[format]:
        (tmp_path / name / folder).mkdir(parents=True)
    # folders that are not steps
    for other in ("step_7/notes", "step_x", "tensorboard"):
        (tmp_path / other).mkdir(parents=True)
    with pytest.raises(UserError, match=f"holds {name}: step_5 .* choose another folder"):
        check_only_step(str(tmp_path), 5)
    check_only_step(str(tmp_path), int(name.removeprefix("step_")))
    check_only_step(str(tmp_path / "nowhere"), 5)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("model.safetensors", "not the folder of a checkpoint: give the folder that holds it"),
        ("absent.gguf", "no such file: absent.gguf"),
        ("model.gguf", "it does not begin as a GGUF file does"),
        ("step_7.tar.zst", "unpack it, and give the folder"),
        ("s3://bucket/model", "s3:// cannot be read: copy s3://bucket/model to a local folder or to gs://"),
    ],
)
def test_what_is_no_folder_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model.safetensors", "model.gguf"):
        Path(name).touch()
    with pytest.raises(UserError, match=words):
        _ = Checkpoint.open(path).format
