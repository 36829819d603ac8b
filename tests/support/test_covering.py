"""The choice of tests: the covering of a product, and what changed files select."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.changed import imported
from support.covering import covering

FACTORS = range(7), "ab", ["x", "y", "z"]


def _cases(*, pairs: bool) -> tuple[list, list]:
    """All cases of a product, and those of its covering."""
    params = covering(*FACTORS, pairs=pairs)
    assert {mark.name for param in params for mark in param.marks} == {"nightly"}
    return [param.values for param in params], [param.values for param in params if not param.marks]


@pytest.mark.parametrize("pairs", [False, True])
def test_a_covering_has_each_value_or_each_pair_and_the_product_all(pairs: bool) -> None:
    whole, daily = _cases(pairs=pairs)
    assert whole == list(itertools.product(*FACTORS))
    size = 2 if pairs else 1
    parts = [set(itertools.combinations(enumerate(case), size)) for case in daily]
    assert set().union(*parts) == {part for case in whole for part in itertools.combinations(enumerate(case), size)}
    # few: at best one for each value, or pair, of the largest factors
    assert len(daily) <= (25 if pairs else 7)
    assert (whole, daily) == _cases(pairs=pairs)


def test_keys_and_texts_name_the_cases() -> None:
    params = covering({"fsdp": 1, "tp": 2}, [True])
    assert [param.id for param in params] == ["fsdp-True", "tp-True"]


def test_a_test_imports_through_support(repo: Path) -> None:
    names = imported(repo / "tests/infer/test_ring.py", repo)
    assert {"tests/infer/test_ring.py", "tests/support/families.py", "mesh_transformer/families/__init__.py"} <= names


def test_changed_files_select_importers_folders_and_parameters(repo: Path, tmp_path: Path) -> None:
    files = {
        "mesh_transformer/__init__.py": "",
        "mesh_transformer/ops/__init__.py": "",
        "mesh_transformer/ops/ring.py": "",
        "mesh_transformer/families/gptj.py": "",
        "tests/conftest.py": "pytest_plugins = ['support.changed']\n",
        "tests/support/changed.py": (repo / "tests/support/changed.py").read_text(),
        "tests/ops/test_near.py": "def test_near(): pass\n",
        "tests/train/test_far.py": "def test_far(): pass\n",
        "tests/train/test_user.py": "import mesh_transformer.ops.ring\ndef test_user(): pass\n",
        "tests/train/test_each.py": "import pytest\n@pytest.mark.parametrize('f', ['gptj', 'a'])\ndef test(f): pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--changed", "HEAD", "-c", "/dev/null"]
    command += ["--rootdir", str(tmp_path), "tests"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{tmp_path}/tests:{tmp_path}"}

    def selected(name: str) -> list[str]:
        (tmp_path / name).write_text("x = 1\n")
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        (tmp_path / name).write_text(files[name])
        return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    assert selected("mesh_transformer/ops/ring.py") == ["test_user", "test_near"]
    assert selected("mesh_transformer/families/gptj.py") == ["test[gptj]"]
