"""A Python or a package that is absent: each command says so in one line, and the documents name the same versions."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mesh_transformer import environment
from mesh_transformer.errors import UserError

COMMANDS = {
    "create_finetune_tfrecords.py": "text.txt name",
    "device_sample.py": "--ckpt ./runs/a --prompt A",
    "device_serve.py": "--ckpt ./runs/a",
    "device_train.py": "--config configs/tiny_shakespeare.json",
    "eval_harness.py": "--ckpt ./runs/a --tasks piqa",
    "from_hf_weights.py": "--input a --output-path b",
    "preflight.py": "--config configs/tiny_shakespeare.json",
    "prepare_dataset.py": "--input a --output b",
    "resharding_example.py": "--config c --ckpt a --out b",
    "slim_model.py": "--ckpt ./runs/a",
    "to_hf_weights.py": "--input-ckpt a --output-path b",
    "tpu_utils.py": "list --zone europe-west4-a",
    "train.py": "--config configs/tiny_shakespeare.json --processes 2",
    "train_tokenizer.py": "--input a.txt --output b",
    "-m examples.fsdp": "",
}
# without site-packages, so that no requirement is found
BARE = [sys.executable, "-S", "-E"]
OLDEST, NEWEST = (".".join(map(str, version)) for version in (environment.OLDEST, environment.NEWEST))


def error_of(command: list[str], folder: Path) -> str:
    """The only line that a command prints. It must exit with code 2."""
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr[-2000:]
    (line,) = (ended.stdout + ended.stderr).splitlines()
    return line


def test_a_package_that_is_absent_is_one_line_in_every_command(repo: Path) -> None:
    commands = {path.name for path in repo.glob("*.py") if "cli.run(" in path.read_text()}
    assert commands == COMMANDS.keys() - {"-m examples.fsdp"}
    for command, arguments in COMMANDS.items():
        line = error_of([*BARE, *command.split(), *arguments.split()], repo)
        assert re.match(
            r"error: the package (jax|jinja2|pydantic|numpy|zstandard|google) is not installed for .*: run ", line
        ), (
            command,
            line,
        )


def test_the_line_names_the_environment_of_the_quickstart(repo: Path, tmp_path: Path) -> None:
    shutil.copy(repo / "device_sample.py", tmp_path)
    shutil.copytree(
        repo / "mesh_transformer", tmp_path / "mesh_transformer", ignore=shutil.ignore_patterns("__pycache__")
    )
    command = [*BARE, "device_sample.py", "--ckpt", "./runs/a", "--prompt", "A"]
    assert error_of(command, tmp_path).endswith("or bash scripts/quickstart.sh")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    assert error_of(command, tmp_path).endswith(": run source .venv/bin/activate")


@pytest.mark.parametrize("version", [(3, 10, 14), (3, 15, 0)])
def test_an_unsupported_python_is_refused(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...]) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    given = ".".join(map(str, version))
    with pytest.raises(UserError, match=f"this is Python {given} .* but {OLDEST} to {NEWEST} is needed: "):
        environment.check_python()


def test_an_older_python_reaches_the_check(repo: Path) -> None:
    """What it has not is not imported before."""
    program = (
        "import sys, types, typing\n"
        "older = types.ModuleType('typing')\n"
        "vars(older).update({name: value for name, value in vars(typing).items() if name != 'Self'})\n"
        "sys.modules['typing'] = older\n"
        "import mesh_transformer.runtime.cli, mesh_transformer.commands\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=repo, check=True)


def test_the_installation_refuses_an_unsupported_python(repo: Path, tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    (tmp_path / "python3").write_text("#!/bin/bash\n[[ $1 == --version ]] && echo Python 3.10.12 || exit 1\n")
    (tmp_path / "python3").chmod(0o755)
    ended = subprocess.run(
        ["bash", repo / "scripts/venv.sh", tmp_path / "venv"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert f"Python {OLDEST} to {NEWEST} is needed; found on the PATH: Python 3.10.12." in ended.stderr
    assert not (tmp_path / "venv").exists()


def test_all_documents_name_the_same_versions(repo: Path) -> None:
    for name in ("README.md", "CONTRIBUTING.md", "scripts/venv.sh"):
        found = set(re.findall(r"[Pp]ython ([0-9.]+) to ([0-9.]+)", (repo / name).read_text()))
        assert found == {(OLDEST, NEWEST)}, name
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={OLDEST},<3.{environment.NEWEST[1] + 1}"
    script = (repo / "scripts/venv.sh").read_text()
    assert f"{environment.OLDEST} <= sys.version_info[:2] <= {environment.NEWEST}" in script
    tried = re.search(r"for name in \${PYTHON:-((?:python[0-9.]* ?)+)}", script)
    assert tried is not None
    minors = range(environment.OLDEST[1], environment.NEWEST[1] + 1)
    assert tried[1].split()[: len(minors)] == [f"python3.{minor}" for minor in minors]
    listed = re.findall(
        r"^Programming Language :: Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE
    )
    assert listed == [f"3.{minor}" for minor in minors]


def test_an_example_that_runs_as_a_script_says_how_to_run_it(repo: Path) -> None:
    line = error_of([sys.executable, "tensor_parallelism.py"], repo / "examples")
    assert line == f"error: an example is a module: cd {repo} && python -m examples.tensor_parallelism"


def test_an_example_without_its_devices_is_one_line(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a platform whose plugin is not installed, unlike libtpu
    monkeypatch.setenv("JAX_PLATFORMS", "rocm")
    line = error_of([sys.executable, "-m", "examples.fsdp"], repo)
    assert line.startswith("error: no device of JAX_PLATFORMS=rocm found: unset it;")


def test_ctrl_c_while_an_example_imports_jax_is_one_line(repo: Path) -> None:
    program = "import examples\nraise KeyboardInterrupt"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=repo, capture_output=True, text=True, env=dict(os.environ)
    )
    assert ended.stderr == "interrupted\n"
    assert ended.returncode == 130


@pytest.mark.parametrize("command", ["device_train.py --config a", "-m mesh_transformer serve", "-m examples.fsdp"])
def test_a_python_without_assertions_is_refused_before_jax_is_imported(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "jax.py").write_text("raise SystemExit('jax is imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = error_of([sys.executable, "-O", *command.split()], repo)
    assert line.startswith("error: Python removes the assert statements that Haiku needs: start it without -O")


def test_the_other_ways_in_refuse_a_python_without_assertions(repo: Path) -> None:
    program = "import mesh_transformer\nmesh_transformer.load('absent')"
    ended = subprocess.run([sys.executable, "-O", "-c", program], cwd=repo, capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].startswith("mesh_transformer.errors.UserError: Python removes the assert")
    doctor = [sys.executable, "-O", "-m", "mesh_transformer", "doctor"]
    shown = subprocess.run(doctor, cwd=repo, capture_output=True, text=True, timeout=300).stdout
    assert "start it without -O" in shown


INTERRUPT = """
import os, signal, sys
def interrupt(event, arguments):
    if event == "import" and arguments[0] == os.environ["INTERRUPTED"]:
        signal.raise_signal(signal.SIGINT)
sys.addaudithook(interrupt)
"""


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("device_train.py --help", "mesh_transformer.commands"),
        ("train.py --help", "argparse"),
        ("-m mesh_transformer train --help", "mesh_transformer.commands"),
        ("-m mesh_transformer train --help", "argparse"),
    ],
)
def test_ctrl_c_before_the_imports_are_done_is_one_line(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, module: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("INTERRUPTED", module)
    ended = subprocess.run([sys.executable, *command.split()], cwd=repo, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_during_an_import_ends_the_process_at_once(repo: Path, tmp_path: Path) -> None:
    """A C extension would turn it into an ImportError."""
    (tmp_path / "extension.py").write_text(
        "import signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except BaseException as error:\n"
        "    raise ImportError('Encountered an error while initializing the extension.') from error\n"
    )
    program = "from mesh_transformer.runtime import cli\ndef main():\n    import extension\ncli.run(main)"
    environment = {**os.environ, "PYTHONPATH": f"{repo}{os.pathsep}{tmp_path}"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")
