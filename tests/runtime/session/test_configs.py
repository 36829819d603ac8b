"""Commands without --config use the config that the checkpoint records."""

import contextlib
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from support.builders import TINY
from support.classic_folders import RandomSource

from mesh_transformer import logs, platforms
from mesh_transformer.checkpoint.native.manifest import decode, encode
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.config import load_config, parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.convert import slim, to_hf, write_step
from mesh_transformer.runtime.session.weights import config_for

RAW = {**TINY, "data": {"tokenizer": "bytes"}, "mesh": {"tp": 1}}
MODEL = parse_config(RAW).model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in the folders run, classic/step_7 and hf. `unknown` and `bare` record no config."""
    folder = tmp_path_factory.mktemp("written")
    source = RandomSource(MODEL, full=True)
    (folder / "config.json").write_text(json.dumps(RAW))
    write_native(source, str(folder / "unknown"))
    write_step(source, MODEL, str(folder / "classic/step_7"), format="classic")
    write_step(source, MODEL, str(folder / "bare/step_7"), format="classic")
    (folder / "bare/step_7/model.json").unlink()
    source.extra = {"config": parse_config(RAW).model_dump(mode="json")}  # as training records it
    write_native(source, str(folder / "run"))
    to_hf(str(folder / "config.json"), [], str(folder / "run"), str(folder / "hf"), dtype="fp32")
    return folder


@pytest.fixture
def here(written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(written)
    monkeypatch.setattr(logs, "set_up", lambda *_: None)  # the test session keeps its own handlers
    monkeypatch.setattr(platforms, "CompileCache", contextlib.nullcontext)  # and its own cache
    return written


@pytest.mark.parametrize("checkpoint", ["run", "run/step_7/", "classic", "classic/step_7", "hf"])
def test_the_model_is_the_checkpoints_and_the_rest_default(here: Path, checkpoint: str) -> None:
    found, _ = config_for(None, ["mesh.tp=2", "model.seq=20"], checkpoint)
    assert found.model == MODEL.model_copy(update={"seq": 20})
    assert found.mesh.tp == 2
    assert found.optimizer == parse_config({"model": TINY["model"]}).optimizer
    assert found.data.tokenizer == ("bytes" if checkpoint.startswith("run") else None)


def test_a_config_file_counts_alone(here: Path) -> None:
    config, checkpoint = config_for("config.json", ["optimizer.lr=1"], "nowhere")
    assert config == load_config("config.json", ["optimizer.lr=1"])
    assert checkpoint.path == "nowhere"


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (None, "use --config FILE, or --ckpt DIR"),
        ("unknown", r"unknown/step_7 does not record its config: .*--config FILE"),
        ("bare", r"bare/step_7 does not record its config: .*--config FILE"),
        ("nowhere", "no checkpoint in nowhere"),
    ],
)
def test_what_knows_no_model_is_refused(here: Path, checkpoint: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_for(None, [], checkpoint)


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"model": "gptj"}, "cannot be read: expected an object"),
        ({"model": {"layers": 2}}, "cannot be read: required and not given"),
        ({"model": {**MODEL.model_dump(), "n_heads": 10**400}}, "cannot be read: model.n_heads"),
        ({"model": {**MODEL.model_dump(), "layers": "../x"}}, "cannot be read: model.layers"),
        ("text", "does not record its config"),
    ],
    ids=["text", "incomplete", "huge", "type", "no object"],
)
def test_a_config_that_is_none_is_one_line(here: Path, tmp_path: Path, recorded: Any, message: str) -> None:
    path = here / "run/step_7/manifest/metadata"
    manifest = decode(json.loads(path.read_text()))
    native, classic, hf = (tmp_path / name for name in ("native/step_1", "classic/step_1", "hf"))
    (native / "manifest").mkdir(parents=True)
    (native / "state").mkdir()
    (native / "manifest/metadata").write_text(json.dumps(encode(manifest._replace(extra={"config": recorded}))))
    (classic / "shard_0").mkdir(parents=True)
    (classic / "model.json").write_text(json.dumps(recorded))
    hf.mkdir()
    (hf / "model.safetensors").touch()
    (hf / "config.json").write_text(json.dumps(recorded))
    with pytest.raises(UserError, match=message) as wrong:
        config_for(None, [], str(native))
    assert "\n" not in str(wrong.value)
    with pytest.raises(UserError, match=message if isinstance(recorded, dict) else "model.json is not a JSON object"):
        config_for(None, [], str(classic))
    with pytest.raises(UserError, match=r"config.json(: model_type is None| is not a JSON object)"):
        config_for(None, [], str(hf))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("checkpoint", ["run", "classic", "hf"])
def test_a_conversion_is_the_same_with_a_config_and_without(here: Path, tmp_path: Path, checkpoint: str) -> None:
    # a classic checkpoint does not record the tokenizer that the config names
    tokenizer = "bytes" if checkpoint == "classic" else None
    for name, config in (("with", "config.json"), ("without", None)):
        to_hf(config, [], checkpoint, str(tmp_path / name), tokenizer=tokenizer)
    assert content(tmp_path / "with") == content(tmp_path / "without")


def test_slim_of_a_run_that_is_named(here: Path) -> None:
    slim("config.json", ["checkpoint.model_dir=run"])
    expected = content(here / "run_slim")
    for checkpoint, step in (("run", None), ("run/step_7", None), ("run/", 7)):
        slim(None, [], checkpoint=checkpoint, step=step, overwrite=True)
        assert content(here / "run_slim") == expected
    with pytest.raises(UserError, match="run/step_7 and --ckpt-step 7 both name a step"):
        slim(None, [], checkpoint="run/step_7", step=7)


COMMANDS = {
    "device_sample": ["--prompt", "a", "--max-new-tokens", "3", "--temperature", "0"],
    "resharding_example": ["--prompt", "a"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_sample_is_the_same_with_a_config_and_without(
    here: Path, repo: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    options = [*COMMANDS[command], "--set", "mesh.dp=8"]
    for config in (["--config", "config.json"], []):
        monkeypatch.setattr(sys, "argv", [command, *config, "--ckpt", "run", *options])
        runpy.run_path(str(repo / f"{command}.py"))["main"]()
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert re.match("a.", outputs[0], re.DOTALL)


@pytest.mark.parametrize("command", ["device_sample", "device_serve", "slim_model"])
def test_a_command_without_a_model_says_what_to_give(
    here: Path, repo: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [command])
    with pytest.raises(UserError, match="no model is given: use --config FILE, or --ckpt DIR"):
        runpy.run_path(str(repo / f"{command}.py"))["main"]()
