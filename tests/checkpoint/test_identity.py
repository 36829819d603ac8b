"""A checkpoint's model is compared with the config's before a tensor is read."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from support.builders import TINY
from support.classic_folders import RandomSource

from mesh_transformer.checkpoint.identity import check_optimizer, check_same_architecture, recorded_model
from mesh_transformer.checkpoint.native.source import NativeSource
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import Config, ModelConfig, parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.optimizers import lion
from mesh_transformer.optimizers.base import OptimizerConfig, Slot
from mesh_transformer.runtime.convert import reshard, slim, to_hf, write_step
from mesh_transformer.runtime.session.engine import open_engine
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.session.weights import open_checkpoint, read_params

RAW = {**TINY, "checkpoint": {"model_dir": "native"}}
MODEL = parse_config(RAW).model
# the tensors have the same shapes but another meaning
OTHER = ["model.n_heads=4", "model.pe_rotary_dims=8"]
DIFFERENCES = [
    "model.n_heads: the config has 4, the checkpoint 8",
    "model.d_head: the config has 16, the checkpoint 8",
    "model.pe_rotary_dims: the config has 8, the checkpoint 4",
    "--ignore-keys model takes the checkpoint's model",
]


def model(**values: Any) -> ModelConfig:
    return parse_config({"model": {**TINY["model"], **values}}).model


@pytest.mark.parametrize(
    "values",
    [
        {"seq": 80, "seed": 3, "scan_unroll": 2},
        {"d_head": 8, "d_ff": 256},
    ],
    ids=["execution", "derived"],
)
def test_fields_outside_the_architecture_may_differ(values: dict[str, Any]) -> None:
    check_same_architecture(model(**values), MODEL, "here")
    check_same_architecture(MODEL, model(**values), "here")


@pytest.mark.parametrize("pe", ["fixed", "t5"])
def test_rotary_dims_are_compared_only_for_rotary_models(pe: str) -> None:
    check_same_architecture(model(pe=pe, pe_rotary_dims=4), model(pe=pe, pe_rotary_dims=8), "here")
    with pytest.raises(UserError) as wrong:
        check_same_architecture(model(pe=pe, pe_rotary_dims=8), MODEL, "here")
    assert f"model.pe: the config has {pe}, the checkpoint rotary" in str(wrong.value)
    assert "pe_rotary_dims" not in str(wrong.value)


OTHERS = {
    "layers": 2, "d_model": 32, "n_heads": 4, "d_head": 16, "d_ff": 128, "n_vocab": 511, "pe": "t5",
    "pe_rotary_dims": 2,
    "norm": "rmsnorm",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_each_field_is_compared(name: str) -> None:
    with pytest.raises(UserError, match=f"here does not match .*\n.*model.{name}: the config has {OTHERS[name]}, the"):
        check_same_architecture(model(**{"d_head": 8, "d_ff": 256, name: OTHERS[name]}), MODEL, "here")


def test_the_family_is_compared() -> None:
    assert {*OTHERS, "family"} == set(MODEL.architecture())
    other = MODEL.model_copy(update={"family": "llama"})
    with pytest.raises(UserError, match="model.family: the config has gptj, the checkpoint llama"):
        check_same_architecture(MODEL, other, "here")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in the folders native, classic/step_7 and hf, each from a conversion; `unknown` records no model."""
    folder = tmp_path_factory.mktemp("written")
    source = RandomSource(MODEL, full=True)
    write_step(source, MODEL, str(folder / "native"), format="native")
    write_step(source, MODEL, str(folder / "classic/step_7"), format="classic")
    write_native(source, str(folder / "unknown"))
    (folder / "config.json").write_text(json.dumps(RAW))
    to_hf(str(folder / "config.json"), [], str(folder / "native"), str(folder / "hf"), dtype="fp32")
    return folder


@pytest.fixture
def without_tensors(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folders without the native tensors: a read of a tensor fails with another message."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "native/step_7/state/d")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(*overrides: str) -> Config:
    return parse_config(RAW, overrides)


def in_session(read: Any, folder: str) -> None:
    read(Session.open(config(*OTHER)), Checkpoint.open(folder))


OPENINGS = {
    "resume": lambda folder: CheckpointStore(folder, read_only=True, model=config(*OTHER).model).restore({}),
    "tune": lambda folder: in_session(open_checkpoint, folder),
    "evaluate": lambda folder: in_session(read_params, folder),
    "sample, serve": lambda folder: open_engine(config(*OTHER), Checkpoint.open(folder), slots=1),
    "to_hf": lambda folder: to_hf("config.json", OTHER, folder, "new"),
    "slim": lambda folder: slim("config.json", [*OTHER, f"checkpoint.model_dir={folder}"], step=None, f16=False),
    "reshard": lambda folder: reshard(
        "config.json",
        OTHER,
        checkpoint=folder,
        shards_out=1,
        output="new/step_7",
        format="classic",
        prompt=None,
    ),
}


# a run resumes only from native steps, and slim_model.py reads the steps of a run
PAIRS = [
    (opening, folder)
    for opening in OPENINGS
    for folder in {"resume": ["native"], "slim": ["native", "classic"]}.get(opening, ["native", "classic", "hf"])
]


@pytest.mark.parametrize(("opening", "folder"), PAIRS)
def test_another_model_is_refused_at_every_opening(without_tensors: Path, opening: str, folder: str) -> None:
    before = sorted(without_tensors.rglob("*"))
    with pytest.raises(UserError) as wrong:
        OPENINGS[opening](folder)
    for line in DIFFERENCES:
        assert line in str(wrong.value)
    assert sorted(without_tensors.rglob("*")) == before


@pytest.mark.parametrize("folder", ["native", "classic"])
def test_a_conversion_records_the_whole_model(written: Path, folder: str) -> None:
    recorded = Checkpoint.open(str(written / folder)).source(MODEL).extra["config"]
    assert parse_config(recorded).model == MODEL


def test_a_checkpoint_without_a_model_gives_one_warning(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(written / "unknown")
    with caplog.at_level(logging.WARNING, "mesh_transformer"):
        for _ in range(2):
            Checkpoint.open(folder).source(parse_config(RAW, OTHER).model)
        Checkpoint.open(str(written / "native")).source(MODEL)
    (warning,) = caplog.messages
    assert warning == (
        f"{folder}/step_7 does not record its model: n_heads, pe_rotary_dims and norm are not checked against the "
        "config"
    )


# what device_sample.py and device_serve.py, and eval_harness.py call
READINGS = {
    "sample, serve": lambda config, folder: open_engine(config, Checkpoint.open(folder), slots=1),
    "evaluate": lambda config, folder: read_params(Session.open(config), Checkpoint.open(folder)),
}


@pytest.mark.parametrize(
    ("reading", "folder"),
    [("sample, serve", "native"), *(("evaluate", folder) for folder in ("native", "classic/step_7", "hf", "unknown"))],
)
def test_a_context_longer_than_the_trained_one_gives_one_warning(
    written: Path, reading: str, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, trained = written / folder, MODEL.seq
    where = path / "step_7" if folder == "native" else path
    expected = (
        f"model.seq is {trained + 1}, but {where} was trained with a context of {trained}: what the model computes "
        f"after position {trained} may be useless"
    )
    for seq in (trained - 1, trained, trained + 1):
        caplog.clear()
        READINGS[reading](config(f"model.seq={seq}"), str(path))
        warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "seq" in r.getMessage()]
        assert warnings == ([expected] if seq > trained and folder != "unknown" else [])


class Plain(OptimizerConfig):
    """An optimizer without slots."""

    name: Literal["plain"] = "plain"

    @property
    def slots(self) -> dict[str, Slot]:
        return {}


def test_an_optimizer_without_slots_needs_no_state_and_drops_none() -> None:
    check_optimizer(RandomSource(MODEL, full=False), Plain())
    with pytest.raises(UserError, match="holds the state of optimizer adam, the config has optimizer.name plain"):
        check_optimizer(RandomSource(MODEL, full=True), Plain())
    with pytest.raises(UserError, match="has no Lion moments"):
        check_optimizer(RandomSource(MODEL, full=False), lion.LionConfig())


def test_a_recorded_model_without_a_family_is_read_whole() -> None:
    model = parse_config({"model": {**TINY["model"], "pe_rotary_dims": 2}}).model
    assert recorded_model({"model": {**model.model_dump(), "family": None}}, "here") == model


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ("gptj", "expected an object"),
        ({"layers": 2}, "required and not given"),
        ({**MODEL.model_dump(), "n_heads": 10**400}, "n_heads"),
        ({**MODEL.model_dump(), "family": ["gptj"]}, "family"),
        ({**MODEL.model_dump(), "clip_qkv": 6}, "this version has no clip_qkv"),
    ],
    ids=["text", "incomplete", "huge", "list", "newer"],
)  # fmt: skip
def test_a_model_that_cannot_be_read_is_refused(tmp_path: Path, recorded: Any, message: str) -> None:
    source = RandomSource(MODEL, full=False)
    source.extra = {"config": {"model": recorded}}
    write_native(source, str(tmp_path))
    with pytest.raises(UserError, match=f"step_7: the model that the checkpoint records cannot be read: .*{message}"):
        Checkpoint.open(str(tmp_path)).source(MODEL)
    assert NativeSource(str(tmp_path / "step_7")).extra["config"] == {"model": recorded}
