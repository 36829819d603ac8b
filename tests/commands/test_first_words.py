"""What a newcomer types first: no command, a misspelt one, a misspelt option or config."""

import logging
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mesh_transformer import commands, logs
from mesh_transformer.cache_folders import data_sets, open_data_sets
from mesh_transformer.config import load_config
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.training import trainer


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command sets the arguments of its process."""
    monkeypatch.setattr(sys, "argv", sys.argv)


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert not commands.main([])
    shown = capsys.readouterr()
    assert shown.err == ""
    assert all(name in shown.out for name in commands.COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("traim", "no such command: traim (did you mean train?); the commands are new, train, "),
        ("to_hf", "no such command: to_hf (did you mean to-hf?)"),
        ("xyz", "no such command: xyz; the commands are new, train, "),
        ("train --config tiny_shakespear", "(did you mean tiny_shakespeare?); the configs by name are "),
        ("train --config Tiny_Shakespeare", "(did you mean tiny_shakespeare?)"),
        ("train --config tiny_shakespeare --set optimizer.lrr=1", "unknown key optimizer.lrr: did you mean"),
        ("sample --config tiny_shakespeare --set model.layers=two", "model.layers = 'two': expected a whole number"),
        ("serve --config tiny_shakespeare --set model.layer=2", "did you mean model.layers?"),
        ("evaluate --config tiny_shakespear --tasks piqa", "(did you mean tiny_shakespeare?)"),
        ("preflight --config tiny_shakespear", "(did you mean tiny_shakespeare?)"),
        ("slim --config tiny_shakespear --ckpt a", "(did you mean tiny_shakespeare?)"),
        ("to-hf --config tiny_shakespear --input-ckpt a --output-path b", "(did you mean tiny_shakespeare?)"),
        ("reshard --config tiny_shakespear --ckpt a --out b", "(did you mean tiny_shakespeare?)"),
    ],
)
def test_a_mistake_is_told_before_jax_is_imported(
    words: str, message: str, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # the log of a command takes the handlers of the root
    monkeypatch.setattr(logs, "set_up", lambda *_: caplog.set_level(logging.INFO, "mesh_transformer"))
    with pytest.raises(UserError) as fault:
        commands.main(words.split())
    assert message in str(fault.value)
    assert "importing JAX" not in caplog.messages


@pytest.mark.parametrize(
    "words", ["train", "serve", "evaluate --tasks piqa", "preflight", "to-hf --input-ckpt a --output-path b"]
)
def test_a_bad_config_is_told_by_a_process_without_jax(words: str, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "jax.py").write_text("raise SystemExit('jax is imported')")
    name, *more = words.split()
    command = [sys.executable, "-m", "mesh_transformer", name, "--config", "tiny_shakespear", *more]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=repo, capture_output=True, text=True, env=environment)
    assert ended.returncode == 2
    assert "did you mean tiny_shakespeare?" in ended.stderr


def test_a_config_from_a_pipe_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `--config <(command)` of a shell."""
    os.mkfifo(tmp_path / "pipe")
    text = (Path(__file__).parents[2] / "configs/tiny_shakespeare.json").read_bytes()
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(text))
    writer.start()
    monkeypatch.setattr(trainer, "run", lambda path, *_: load_config(path).model.layers)
    assert commands.main(["train", "--config", str(tmp_path / "pipe")]) == 4
    writer.join()


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        ("train --confg tiny_shakespeare", "--confg (did you mean --config?)"),
        ("serve --slts=4", "--slts (did you mean --slots?)"),
        ("tokenizer --input a --vocab-size 500", "--vocab-size (did you mean --vocab?)"),
    ],
)
def test_a_misspelt_option_is_named_before_one_that_is_missing(
    words: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(words.split())
    assert ended.value.code == 2
    name, *_ = words.split()
    assert capsys.readouterr().err == f"error: no such option: {suggestion}; see mesh-transformer {name} --help\n"


@pytest.mark.parametrize(
    "words",
    [
        "drive --config absent --tpu a --tpu-region europe-west4-a",
        "evaluate --config absent --tasks piqa --tpu_region z --tpu a",
        "sample --config absent --prompt '--seed money'",
        "train --config absent --set optimizer.lr=1 --tune-model-pa hf://a/b",
    ],
)
def test_words_that_argparse_takes_are_taken(words: str) -> None:
    """Other spellings of an option, its beginning, and a value that looks like one."""
    with pytest.raises(UserError, match="no such file: absent"):
        commands.main(shlex.split(words))


def test_the_options_of_an_action_are_not_those_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(shlex.split("tpu create x --zone z --label a=b"))
    assert "the following arguments are required: --type" in capsys.readouterr().err


def test_the_beginning_of_an_option_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match="no such file"):
        commands.main(["train", "--conf", "absent.json"])


WITHOUT_TORCH = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Hidden())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
"""


@pytest.mark.parametrize(
    "program",
    [
        "from mesh_transformer.data.tokens.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1])",
        "from mesh_transformer.data.tokens.byte_tokenizer import bytes_of_characters; bytes_of_characters()",
    ],
)
def test_the_absence_of_torch_is_not_told(program: str, texts: Path, repo: Path) -> None:
    words = [sys.executable, "-c", WITHOUT_TORCH + program, str(texts / "gpt2_tokenizer")]
    ended = subprocess.run(words, cwd=repo, capture_output=True, text=True, check=True)
    assert ended.stdout + ended.stderr == ""


def test_the_cached_data_sets_of_an_earlier_version_are_moved_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    earlier = tmp_path / "mesh_transformer/datasets"
    earlier.mkdir(parents=True)
    (earlier / "a.tfrecords").write_text("a")
    assert open_data_sets() == data_sets() == str(tmp_path / "mesh-transformer/datasets")
    assert os.listdir(data_sets()) == ["a.tfrecords"]
    assert os.listdir(tmp_path) == ["mesh-transformer"]
    # an earlier version has run again
    earlier.mkdir(parents=True)
    (earlier / "b.tfrecords").write_text("b")
    open_data_sets()
    assert os.listdir(data_sets()) == ["a.tfrecords"]
    assert os.listdir(earlier) == ["b.tfrecords"]


def test_a_new_machine_has_one_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert os.listdir(open_data_sets()) == []
    assert os.listdir(tmp_path / "cache") == ["mesh-transformer"]
