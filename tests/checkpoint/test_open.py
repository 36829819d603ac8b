"""A path is asked once: what is looked for, listed and read, of a checkpoint and in each command."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.builders import TINY
from support.classic_folders import RandomSource
from support.gcs_server import GcsServer
from support.hub_server import HubServer

from mesh_transformer import files, logs, platforms
from mesh_transformer.checkpoint.native.format import NativeStep
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.open import Checkpoint, CheckpointTokenizer
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.checkpoint.tensors import UpdateCounts
from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.convert import from_hf, reshard, slim, to_hf, write_step
from mesh_transformer.runtime.evaluation import command as evaluation
from mesh_transformer.runtime.sampling import sampler
from mesh_transformer.runtime.serving import start as serving
from mesh_transformer.runtime.session import engine
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.training.start import LoggedProgress, TuningSource, resume_or_start
from mesh_transformer.train.step import TrainProgram

MODEL = parse_config(TINY).model
Asked = Counter[tuple[str, str]]


def write_run(root: str, *, step: int = 7, tokenizer: str | None = None) -> None:
    """A step of a run that records its model, and perhaps its tokenizer."""
    source = RandomSource(MODEL, full=True)
    source.counts = UpdateCounts(step, step, step)
    source.extra = {"config": {"model": MODEL.model_dump(mode="json"), "data": {"tokenizer": tokenizer}}}
    write_native(source, root)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in the folders run, named (which names its tokenizer), classic/step_7 and hf, and its config.json."""
    folder = tmp_path_factory.mktemp("written")
    write_run(str(folder / "run"))
    write_run(str(folder / "named"), tokenizer="bytes")
    write_step(RandomSource(MODEL, full=True), MODEL, str(folder / "classic/step_7"), format="classic")
    to_hf(None, [], str(folder / "run"), str(folder / "hf"))
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def here(written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(written)
    # the test session keeps its own handlers, and its own cache
    monkeypatch.setattr(logs, "set_up", lambda *_: None)
    monkeypatch.setattr(platforms, "CompileCache", contextlib.nullcontext)
    return written


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """How often each path was looked for, listed and read."""
    calls: Asked = Counter()
    find, list_dir, read_range = NativeStep.find, files.list_dir, files.read_range

    def look(folder: Any) -> Any:
        calls["look", folder.path] += 1
        return find(folder)

    def listing(path: str) -> list[str]:
        calls["list", path] += 1
        return list_dir(path)

    def read(path: str, *part: int) -> bytes:
        calls["read", path] += 1
        return read_range(path, *part)

    monkeypatch.setattr(NativeStep, "find", look)
    monkeypatch.setattr(files, "list_dir", listing)
    monkeypatch.setattr(files, "read_range", read)
    return calls


def looks(asked: Asked) -> dict[str, int]:
    return {path: count for (what, path), count in asked.items() if what == "look"}


@pytest.mark.parametrize("config", ["config.json", None])
@pytest.mark.parametrize("path", ["run/step_7", "run"])
def test_an_export_asks_its_checkpoint_once(
    here: Path, tmp_path: Path, asked: Asked, path: str, config: str | None
) -> None:
    """Neither the config nor the step names a tokenizer: the folders are asked for one too."""
    to_hf(config, [], path, str(tmp_path / "new"))
    assert looks(asked) == {path: 1}
    assert asked["list", "run/step_7"] == asked["list", "run"] == 1
    assert asked["read", "run/step_7/manifest/metadata"] == 1


def test_nothing_is_read_before_it_is_asked_for(asked: Asked) -> None:
    checkpoint = Checkpoint.open("nowhere")
    assert str(checkpoint) == checkpoint.path == "nowhere"
    assert not asked
    for _ in range(2):
        with pytest.raises(UserError, match="no checkpoint in nowhere"):
            _ = checkpoint.format


def answers(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """What it says of itself."""
    source = checkpoint.source(MODEL)
    described = (checkpoint.format, checkpoint.folder, checkpoint.model, checkpoint.config, checkpoint.tokenizer)
    return (*described, source.tensors.keys(), checkpoint.origin(source))


@pytest.mark.parametrize(
    ("path", "folder", "format", "described"),
    [
        ("run", "run/step_7", "native", "manifest/metadata"),
        ("gs://bucket/run", "gs://bucket/run/step_7", "native", "manifest/metadata"),
        ("classic", "classic/step_7", "classic", "model.json"),
        ("hf", "hf", "Hugging Face", None),
    ],
)
def test_each_answer_is_read_once(
    here: Path, gcs: GcsServer, asked: Asked, path: str, folder: str, format: str, described: str | None
) -> None:
    if files.is_remote(path):
        write_run(path)
        asked.clear()
    checkpoint = Checkpoint.open(path)
    first = answers(checkpoint)
    assert first == answers(checkpoint)
    assert first[:3] == (format, folder, MODEL)
    assert looks(asked) == {path: 1}
    # each source lists the weights of a Hugging Face folder, and each origin reads its files
    if described is not None:
        assert asked["list", path] == asked["read", files.join(folder, described)] == 1


def test_a_checkpoint_stays_the_step_that_was_found(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    write_run(root, step=1)
    checkpoint = Checkpoint.open(root)
    assert checkpoint.folder.endswith("step_1")
    write_run(root, step=2)
    assert checkpoint.folder.endswith("step_1")
    assert checkpoint.source(MODEL).counts.step == 1
    assert Checkpoint.open(root).folder.endswith("step_2")


def test_two_models_in_one_folder_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = str(tmp_path / "run")
    write_run(root, step=1)
    (tmp_path / "run/model.safetensors").touch()
    checkpoint = Checkpoint.open(root)
    assert checkpoint.format == "native"
    assert checkpoint.folder.endswith("step_1")
    (message,) = caplog.messages
    assert message.startswith(f"{root} holds a Hugging Face model too (model.safetensors): its native checkpoint is ")


def test_weights_of_a_name_on_the_hub_are_downloaded_for_the_source(here: Path, hub_server: HubServer) -> None:
    hub_server.commit("org/model", {path.name: path.read_bytes() for path in Path("hf").iterdir()})
    checkpoint = Checkpoint.open("hf://org/model")
    assert (checkpoint.format, checkpoint.model) == ("Hugging Face", MODEL)
    assert checkpoint.config is not None
    assert checkpoint.tokenizer == CheckpointTokenizer(checkpoint.folder, kept=True)
    assert "model.safetensors" not in hub_server.downloads()
    for _ in range(2):
        assert checkpoint.source(MODEL).where == checkpoint.folder
        assert hub_server.downloads().count("model.safetensors") == 1


def test_a_conversion_checks_config_json_before_it_downloads_weights(here: Path, hub_server: HubServer) -> None:
    hub_server.commit("org/model", {"config.json": b'{"model_type": "other"}', "model.safetensors": b"x"})
    with pytest.raises(UserError, match="config.json: model_type is 'other'"):
        from_hf("hf://org/model", "new", format="native")
    assert hub_server.downloads() == ["config.json"]


class Read(Exception):
    """The weights have been read."""


def end(*_: Any, **__: Any) -> None:
    raise Read


def tune() -> None:
    session = Session.open(parse_config(TINY, ["checkpoint.model_dir=new"]))
    program = TrainProgram(session.placement, session.config)
    resume_or_start(session, program, CheckpointStore("new"), TuningSource("named"), LoggedProgress())


CONFIG = ("config.json", ["mesh.tp=1"])
# a command, and the paths that it looks for
COMMANDS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "sample": (lambda: sampler.run(*CONFIG, sampler.SampleOptions(checkpoint="named", prompt="a")), ["named"]),
    "serve": (lambda: serving.run(*CONFIG, serving.ServeOptions(checkpoint="named", port=0)), ["named"]),
    "evaluate": (lambda: evaluation.run(*CONFIG, evaluation.EvalOptions(checkpoint="named")), ["named"]),
    "tune": (tune, ["named"]),
    "slim": (lambda: slim(*CONFIG, checkpoint="named"), ["named"]),
    "reshard": (
        lambda: reshard(
            "config.json", [], checkpoint="named", shards_out=1, output="out/step_7", format="classic", prompt="a"
        ),
        ["named", "out/step_7"],
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_asks_its_checkpoint_once(
    here: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Up to the end of what it reads: the config, the tokenizer and the weights."""
    if command == "evaluate":
        pytest.importorskip("lm_eval")
    monkeypatch.setattr(engine, "ServingEngine", end)
    monkeypatch.setattr(evaluation, "EvalModel", end)
    monkeypatch.setattr(evaluation, "Tasks", lambda *_, **__: None)
    monkeypatch.setattr(serving, "EngineLoop", lambda opener, **_: opener())
    run, paths = COMMANDS[command]
    if command in ("tune", "slim"):
        run()
    else:
        with pytest.raises(Read):
            run()
    assert looks(asked) == dict.fromkeys(paths, 1)
    assert asked["list", "named/step_7"] == asked["read", "named/step_7/manifest/metadata"] == 1
