"""`fit`, in this process, and the page docs/python.md."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.commands import CONFIG, REPO, write_run
from support.doc_blocks import blocks

import mesh_transformer
from mesh_transformer.errors import UserError

SHORT: dict[str, Any] = {"optimizer": {"total_steps": 2}, "data": {"val_set": {}}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the text of CONFIG."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    return tmp_path


def test_a_run_resumes_and_its_model_is_the_newest(folder: Path) -> None:
    first = mesh_transformer.fit(CONFIG, **SHORT)
    assert (first.folder, first.step, first.checkpoint) == ("run", 2, "run/step_2")
    whole = mesh_transformer.fit(folder / "config.json", optimizer={"total_steps": 3}, data={"val_set": {}})
    assert (whole.step, [row["step"] for row in whole.metrics]) == (3, [1, 2, 3])
    with whole.load(slots=1) as model:
        assert model.config.model.layers == 2
        assert len(model.generate("12", max_tokens=4, ignore_eos=True).tokens) == 4
        assert model._checkpoint.source(model.config.model).counts.step == 3


def test_a_fine_tuning_takes_its_model_from_a_checkpoint(folder: Path) -> None:
    base = mesh_transformer.fit(CONFIG, **SHORT)
    without = {group: values for group, values in CONFIG.items() if group != "model"}
    tuned = mesh_transformer.fit(without, tune_from=base.checkpoint, checkpoint={"model_dir": "tuned"}, **SHORT)
    assert (tuned.folder, tuned.step) == ("tuned", 2)
    with tuned.load(slots=1) as model:
        assert model.config.model.d_model == 32


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        (CONFIG, {"optimizer": {"totl_steps": 2}}, "optimizer.totl_steps"),
        (CONFIG, {"optimiser": {"lr": 2}}, "optimiser"),
        (CONFIG, {"optimizer": 3}, 'give the values of a group, such as optimizer={"key": value}'),
        (CONFIG, {"fresh_opt": True}, "give tune_from too"),
        (CONFIG, {"tune_from": "nowhere"}, "nowhere"),
        (CONFIG, {"mesh": {"tp": 3}}, "mesh.tp 3"),
        ("no_such_config", {}, "no_such_config"),
        ({"model": 5}, {}, "model = 5"),
    ],
)
def test_mistakes(folder: Path, config: Any, arguments: Any, words: str) -> None:
    with pytest.raises(UserError) as raised:
        mesh_transformer.fit(config, **arguments)
    assert words in str(raised.value)
    assert not list(folder.glob("run/step_*"))


def test_a_folder_of_another_run(folder: Path) -> None:
    mesh_transformer.fit(CONFIG, **SHORT)
    with pytest.raises(UserError, match="d_model") as raised:
        mesh_transformer.fit(CONFIG, model={"d_model": 64}, **SHORT)
    assert "run" in str(raised.value)


@pytest.mark.nightly
def test_the_page(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The Python blocks of docs/python.md, as one program. A model with a chat template stands for the run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder, tmp_path / "runs/tiny_shakespeare")
    monkeypatch.setattr(mesh_transformer.Server, "wait", lambda server: None)
    first, *others = [block.text for block in blocks(REPO, REPO / "docs/python.md") if block.kind == "python"]
    names: dict[str, Any] = {}
    exec(first, names)
    with mesh_transformer.load("runs/tiny_shakespeare") as names["model"]:
        for text in others:
            exec(text, names)
    assert capsys.readouterr().out.count("http://127.0.0.1:") == 1
    records = (tmp_path / "runs/from_python/metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["step"] == 20
