"""The command doctor in processes of its own: its lines, its exit code, what it does not import and does not show."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.doctored import WORKING_JAX, write_jax, write_package, write_program

from mesh_transformer.doctor.checks import checks

SECRETS = {
    "HF_TOKEN": "hf_sekret_01234",
    "WANDB_API_KEY": "wandb-sekret-5678",
    "AWS_ACCESS_KEY_ID": "AKIASEKRET9012",
    "AWS_SECRET_ACCESS_KEY": "aws/sekret+3456",
}


def doctor(
    home: Path, repo: Path, *arguments: str, python: str = sys.executable, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`python -m mesh_transformer doctor` of a user whose home, packages and programs are in `home`."""
    environment = {
        "HOME": str(home),
        "PATH": f"{home / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin",
        "PYTHONPATH": f"{home}{os.pathsep}{repo}",
        **variables,
    }
    command = [python, "-m", "mesh_transformer", "doctor", *arguments]
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=120)


def lines(ended: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_a_machine_in_order(tmp_path: Path, repo: Path) -> None:
    write_jax(tmp_path)
    ended = doctor(tmp_path, repo, "--json", PYTHONPROFILEIMPORTTIME="1")
    found = lines(ended)
    assert ended.returncode == 0, ended.stdout
    assert list(dict.fromkeys(line["check"] for line in found)) == list(checks(0, online=False))
    assert all(line.keys() == {"check", "level", "found", "mend"} for line in found)
    # what is not ok has a mend
    assert all(line["mend"] for line in found if line["level"] != "ok")
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "mesh_transformer.doctor.devices" in imported
    assert not imported & {"jax", "jaxlib", "numpy", "ray", "google.auth"}


def test_a_problem_is_a_line_with_its_mend(tmp_path: Path, repo: Path) -> None:
    write_jax(tmp_path)
    write_package(tmp_path, "numpy", "1.26.4")
    ended = doctor(tmp_path, repo)
    assert ended.returncode == 1
    problems = [line for line in ended.stdout.splitlines() if line.startswith("problem ")]
    assert (
        problems[0] == "problem  packages: numpy 1.26.4 is installed, but <3,>=2.0 is needed; mend: pip install "
        "'numpy<3,>=2.0'"
    )


def test_an_environment_without_packages(tmp_path: Path, repo: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    ended = doctor(tmp_path, repo, "--json", python=str(tmp_path / "venv/bin/python"))
    assert ended.returncode == 1
    assert ended.stderr == ""
    found = {line["check"]: line for line in lines(ended)}
    assert found["packages"]["level"] == "problem"
    assert found["packages"]["found"].startswith("not installed: jax, jaxlib, ")
    assert found["devices"]["level"] == "warning"
    assert not any("failed" in line["found"] for line in lines(ended))


@pytest.mark.parametrize("version", ["3.9", "3.10"])
def test_an_old_python(tmp_path: Path, repo: Path, version: str) -> None:
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip(f"there is no Python {version} here")
    ended = doctor(tmp_path, repo, "--json", python=python)
    assert ended.returncode == 1
    assert ended.stderr == ""
    python_line, *others = lines(ended)
    assert (python_line["check"], python_line["level"]) == ("python", "problem")
    # cloud/api.py needs 3.10
    assert {line["check"] for line in others if "failed" in line["found"]} <= {"pods"}


def test_no_secret_is_shown(tmp_path: Path, repo: Path) -> None:
    """Neither those that are found, nor those that a program prints."""
    write_jax(tmp_path, "import os; raise RuntimeError(os.environ['HF_TOKEN'])")
    write_program(tmp_path / "bin", "nvidia-smi", "echo $WANDB_API_KEY; exit 9")
    for name in (".netrc", ".aws/credentials", ".cache/huggingface/token", "key.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("machine api.wandb.ai password file-sekret")
    ended = doctor(
        tmp_path,
        repo,
        GOOGLE_APPLICATION_CREDENTIALS=str(tmp_path / "key.json"),
        HTTPS_PROXY="http://me:proxy-sekret@localhost:1",
        HF_ENDPOINT="http://me:hub-sekret@localhost:1",
        JAX_PLATFORM_NAME=SECRETS["AWS_SECRET_ACCESS_KEY"],
        **SECRETS,
    )
    assert "<HF_TOKEN>" in ended.stdout
    assert "<WANDB_API_KEY>" in ended.stdout
    assert "<AWS_SECRET_ACCESS_KEY>" in ended.stdout
    assert "sekret" not in (ended.stdout + ended.stderr).lower()


def test_a_line_is_printed_before_the_next_check(tmp_path: Path, repo: Path) -> None:
    write_jax(tmp_path, "import time; time.sleep(100)\n" + WORKING_JAX)
    command = [sys.executable, "-m", "mesh_transformer", "doctor"]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin", "PYTHONPATH": f"{tmp_path}{os.pathsep}{repo}"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # the check before the devices
        assert any(" tpu: " in line for line in iter(process.stdout.readline, ""))
        process.terminate()
        process.stdout.read()
    assert process.returncode == 128 + 15
