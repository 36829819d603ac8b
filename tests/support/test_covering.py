"""The choice of tests: the covering of a product, and what changed files select."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import coverage
import pytest

from support.changed import imported
from support.covering import covering

FACTORS = range(7), "ab", ["x", "y", "z"]


def _cases(*, pairs: bool) -> tuple[list, list]:
    """All cases of a product, and those of its covering."""
    params = covering(*FACTORS, pairs=pairs)
    assert {mark.name for param in params for mark in param.marks} == {"nightly", "variant"}
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


FILES = {
    "mesh_transformer/__init__.py": "",
    "mesh_transformer/ops/__init__.py": "",
    "mesh_transformer/ops/ring.py": "def near():\n    return 1\n\n\ndef far():\n    return 2\n",
    "mesh_transformer/families/gptj.py": "",
    "tests/conftest.py": "pytest_plugins = ['support.changed']\n",
    "tests/families/test_files.py": "def test_files(): pass\n",
    "tests/ops/test_near.py": "def test_near(): pass\n",
    "tests/train/test_far.py": "def test_far(): pass\ndef test_line(): pass\ndef test_slow(): pass\n",
    "tests/train/test_user.py": "import mesh_transformer.ops.ring\ndef test_user(): pass\n",
    "tests/train/test_each.py": "import pytest\n@pytest.mark.parametrize('f', ['gptj', 'a'])\ndef test(f): pass\n",
}


@pytest.fixture
def checkout(repo: Path, tmp_path: Path) -> Path:
    """A repository whose only commit has all FILES."""
    root = tmp_path / "checkout"
    plugins = {
        f"tests/support/{name}.py": (repo / f"tests/support/{name}.py").read_text() for name in ("changed", "recorded")
    }
    for name, text in {**FILES, **plugins}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b", "-C", str(root)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    return root


def selected(checkout: Path, name: str, old: str = "", new: str = "x = 1\n") -> tuple[list[str], str]:
    """The tests that a changed file selects, and the whole output. `old`: what is replaced by `new`; empty: all."""
    (checkout / name).write_text(FILES[name].replace(old, new) if old else new)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--changed", "HEAD", "-c", "/dev/null"]
    environment = {
        **os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{checkout}/tests:{checkout}",
        "XDG_CACHE_HOME": str(checkout.parent / "cache"),
    }  # fmt: skip
    done = subprocess.run(
        [*command, "--rootdir", str(checkout), "tests"], cwd=checkout, env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    (checkout / name).write_text(FILES[name])
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line], done.stdout


def test_changed_files_select_importers_parameters_and_folders(checkout: Path) -> None:
    tests, output = selected(checkout, "mesh_transformer/ops/ring.py")
    assert tests == ["test_user", "test_near"]
    assert "chosen by folder and import alone" in output
    assert selected(checkout, "mesh_transformer/families/gptj.py")[0] == ["test[gptj]", "test_files"]


def test_changed_lines_select_the_tests_that_ran_them(checkout: Path) -> None:
    """The nearest first, as far as five minutes go."""
    records = checkout.parent / "cache/mesh-transformer-tests/records"
    records.mkdir(parents=True)
    data = coverage.CoverageData(str(records / "coverage"))
    for test, lines in {"line (call)": [2], "slow": [6], "far": [6]}.items():
        data.set_context(f"tests/train/test_far.py::test_{test}")
        data.add_lines({"/another/checkout/mesh_transformer/ops/ring.py": lines})
    data.write()
    seconds = [["tests/train/test_far.py::test_slow", 299], ["tests/train/test_far.py::test_far", 2]]
    (records / "seconds-1").write_text("".join(json.dumps(row) + "\n" for row in seconds))
    tests, output = selected(checkout, "mesh_transformer/ops/ring.py", "return 1", "return 3")
    assert tests == ["test_user", "test_near", "test_line", "test_far"]
    assert "left out: 1 tests that run changed files too, after 300 s of CPU time" in output
    assert selected(checkout, "mesh_transformer/ops/ring.py", "return 2", "return 3")[0][2:] == ["test_far"]


def test_the_tests_mirror_the_package(repo: Path) -> None:
    """So that each file of the package selects tests by its folder."""
    for path in (repo / "mesh_transformer").rglob("*.py"):
        folder = repo / "tests" / path.parent.relative_to(repo / "mesh_transformer")
        assert next(folder.rglob("test_*.py"), None), f"{path.relative_to(repo)} has no tests in {folder}"
