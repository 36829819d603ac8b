"""`mesh-transformer`: its commands, and the wheel in another folder."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.builders import TINY

from mesh_transformer import commands, environment
from mesh_transformer.config import load_config, shipped
from mesh_transformer.errors import UserError

HEAVY = {"numpy", "pydantic", "jax", "haiku", "ray", "transformers", "google.auth", "matplotlib", "fastapi", "asyncio"}


def given(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m mesh_transformer ...`."""
    command = [sys.executable, "-m", "mesh_transformer", *arguments]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)


def test_a_command_and_its_script_are_one_function(repo: Path) -> None:
    assert environment.SCRIPTS.keys() <= commands.COMMANDS.keys()
    for name, script in environment.SCRIPTS.items():
        module = f"mesh_transformer.commands.{name.replace('-', '_')}"
        text = (repo / script).read_text()
        assert f"from {module} import main\n" in text, script
        assert "cli.run(main)" in text, script


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_imports_nothing_heavy(name: str, repo: Path) -> None:
    """A process that imports one of them needs half a second of CPU and more."""
    shown = given(name, "--help", cwd=repo, PYTHONPROFILEIMPORTTIME="1")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"usage: mesh-transformer {name} "), shown.stdout
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & HEAVY


def test_the_program_names_its_commands_and_version(repo: Path) -> None:
    shown = given("--help", cwd=repo).stdout
    assert all(f"\n    {name} " in shown or f"\n    {name}\n" in shown for name in commands.COMMANDS)
    assert given("--version", cwd=repo).stdout.split() == [
        environment.PROGRAM,
        importlib.metadata.version(environment.PROGRAM),
    ]


@pytest.mark.parametrize("arguments", [["trian"], ["train", "--bogus"]])
def test_a_mistake_of_the_program_is_one_line(arguments: list[str], repo: Path) -> None:
    ended = given(*arguments, cwd=repo)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(" --help")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mesh-transformer ser", {"serve "}),
        ("mesh-transformer from-hf --te", {"--text-only "}),
        ("mesh-transformer tpu cr", {"create "}),
        ("mesh-transformer records --p", {"--preserve-data-order "}),
    ],
)
def test_a_shell_completes(line: str, words: set[str], repo: Path, tmp_path: Path) -> None:
    found = tmp_path / "words"
    completion = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(found),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    assert given(cwd=repo, **completion).returncode == 0
    assert set(found.read_text().split("\v")) == words


def test_a_shipped_config_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("tiny_shakespeare")
    assert config == load_config("tiny_shakespeare.json") == load_config("configs/tiny_shakespeare.json")
    assert config.data.train_files == (str(repo / "data/tiny_shakespeare/train.txt"),)
    # a file of the folder comes before a shipped one
    Path("70M").write_text(json.dumps({"model": {**TINY["model"], "layers": 3}}))
    assert load_config("70M").model.layers == 3
    with pytest.raises(UserError, match="configs by name are .*tiny_shakespeare"):
        load_config("tiny_shakspeare")
    assert set(shipped.names()) == {path.stem for path in (repo / "configs").glob("*.json")}


def test_the_data_of_the_folder_come_before_the_shipped_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = Path("data/tiny_shakespeare/train.txt")
    own.parent.mkdir(parents=True)
    own.write_text("A text of one's own.")
    assert load_config("tiny_shakespeare").data.train_files == (str(own),)


def test_messages_name_the_command_that_the_user_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["device_train.py"])
    assert (environment.command("slim"), environment.command_line("slim")) == ("slim_model.py", "python slim_model.py")
    monkeypatch.setattr(sys, "argv", ["mesh-transformer train"])
    assert environment.command("slim") == environment.command_line("slim") == "mesh-transformer slim"
