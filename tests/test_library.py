"""The public surface of the library: its signatures, its page, and the names that the examples use."""

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

OTHERS = {"examples", "haiku", "jax", "numpy", "optax", *sys.stdlib_module_names}
MOST_LINES = 120


@pytest.fixture(scope="module")
def script(repo: Path) -> dict[str, Any]:
    """The functions of the script that writes the signatures."""
    return runpy.run_path(str(repo / "scripts" / "library_signatures.py"))


def test_the_signatures_are_those_of_the_file(script: dict[str, Any]) -> None:
    assert script["FILE"].read_text() == script["signatures"](), (
        "the public names of docs/library.md have changed: if that is intended, change the page, and run "
        "python scripts/library_signatures.py"
    )


def test_the_page_names_all_public_names(repo: Path, script: dict[str, Any]) -> None:
    page = (repo / "docs" / "library.md").read_text()
    for module, names in script["names"]().items():
        assert f"`{module}`" in page
        section = page[page.index(f"## `{module}`") :].partition("\n## ")[0]
        assert not [name for name in names if not re.search(rf"`[^`]*\b{name}\b", section)], module


def foreign(source: str, public: dict[str, list[str]]) -> Iterator[str]:
    """The imports of a file that are neither public names of the library nor of another package that users have."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] not in OTHERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in OTHERS:
            yield from (
                f"{node.module}.{n.name}" for n in node.names if n.name not in public.get(node.module or "", ())
            )


def test_examples_import_public_names_and_are_short(repo: Path, script: dict[str, Any]) -> None:
    public, files = script["names"](), sorted((repo / "examples").glob("*.py"))
    assert len(files) >= 9
    # __init__.py prepares the process, and examples.py explains a mistake
    examples = [file for file in files if file.name not in ("__init__.py", "examples.py")]
    assert not {file.name: names for file in examples if (names := list(foreign(file.read_text(), public)))}
    long = [file.name for file in files if len(file.read_text().splitlines()) > MOST_LINES]
    assert not set(long) - {"common.py"}


def test_a_private_name_is_found() -> None:
    source = "import ray\nfrom mesh_transformer.train import gradients, step\nimport jax.numpy"
    assert list(foreign(source, {"mesh_transformer.train": ["gradients"]})) == ["ray", "mesh_transformer.train.step"]


def test_the_program_of_the_page_runs(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it ran before, without a warning. The loss falls, and is not zero."""
    (program,) = re.findall(r"^```python\n(.*?)^```", (repo / "docs" / "library.md").read_text(), re.DOTALL | re.M)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(compile(program, "docs/library.md", "exec"), found)  # noqa: S102
    # the end of a second run
    exec(program[program.index("save_tree(") :], found)  # noqa: S102
    assert not [record for record in caplog.records if record.levelname != "INFO"]
    assert 1e-3 < found["losses"][-1] < found["losses"][0] / 2
    loaded, trained = found["found"].state["params"], found["params"]
    jax.tree.map(np.testing.assert_array_equal, loaded, trained)
    matrix = loaded["blocks"]["up"]["w"]
    assert matrix.sharding.shard_shape(matrix.shape) == (1, 32, 64)
