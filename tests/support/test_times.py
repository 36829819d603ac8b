"""The plugin that says where the time of tests goes."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from support.times import COLUMNS, covered, table

TEST = """
import subprocess, time
import jax, jax.numpy as jnp

def test_compile():
    jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3)))

def test_wait():
    time.sleep(0.3)

def test_process():
    subprocess.run(["python3", "-c", "sum(range(10**7))"], check=True)
"""


def test_a_run_says_where_its_time_went(tmp_path: Path, repo: Path) -> None:
    """With a worker of pytest-xdist, which measures and hands its figures to the process that writes them."""
    (tmp_path / "test_some.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {repo / 'tests'}\n")
    (tmp_path / "conftest.py").write_text("from support.times import pytest_addoption, pytest_configure\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--times", "times.json", "-n1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    (found,) = json.loads((tmp_path / "times.json").read_text()).items()
    assert found[0] == "test_some.py"
    seconds = found[1]
    assert set(seconds) == set(COLUMNS)
    assert 0 < seconds["compiling"] < seconds["wall"]
    assert seconds["processes"] > 0.05
    assert 0.3 < seconds["waiting"] <= seconds["wall"] - seconds["own"] + 0.1
    assert "test_some.py" in run.stdout.split("seconds by file")[1]


def test_nested_and_parallel_phases_count_once() -> None:
    assert covered([(0, 4), (1, 2), (3, 5), (7, 8), (7, 8)]) == 6
    assert covered([]) == 0


def test_the_slowest_come_first_and_folders_are_sums() -> None:
    files = {
        f"tests/{name}.py": Counter(dict.fromkeys(COLUMNS, seconds))
        for name, seconds in {"a/x": 1.0, "a/y": 3.0, "b/z": 2.0}.items()
    }
    names = [line.split()[-1] for line in table(files)][1:]
    assert names == ["tests/a/y.py", "tests/b/z.py", "tests/a/x.py", "all", "tests/a", "tests/b"]
