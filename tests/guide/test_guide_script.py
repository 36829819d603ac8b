"""scripts/guide.py, on a small guide."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from mesh_transformer.errors import UserError

HEAD = """---
jupytext:
  text_representation: {extension: .md, format_name: myst}
kernelspec: {display_name: Python 3, language: python, name: python3}
---
# One number

Prose, and `code`.

"""
CELLS = """```{code-cell} ipython3
:tags: [hide-input]

import os
number = 2
print(f"the backend is {os.environ['MPLBACKEND']}")
```

```python
raise SystemExit("this block is no cell")
```

```{code-cell} ipython3
---
tags: [remove-output]
---
assert number == 2, "the number is another one"
```
"""
EXERCISES = '''
def double(x):
    """Twice x."""
    raise NotImplementedError


def half(x):
    """Half of x."""
    raise NotImplementedError


def square(x):
    """The square of x."""
    raise NotImplementedError
'''
CHECKS = """
def check_double(answer):
    assert answer(3) == 6, f"double(3) is {answer(3)},\\n  and not 6"


def check_half(answer):
    assert abs(answer(3) - 1.5) < 0.1


def check_square(answer):
    assert answer(3) == 9
"""


@pytest.fixture
def script(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a guide of one chapter in a temporary folder."""
    spec = importlib.util.spec_from_file_location("guide_script", repo / "scripts" / "guide.py")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr(sys, "path", sys.path[:])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path / "guide"
    for name, text in {
        "03_number.md": HEAD + CELLS,
        "exercises/ex03.py": EXERCISES,
        "checks/ex03.py": CHECKS,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(module, "GUIDE", folder)
    return module


@pytest.fixture
def call(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Call the script's entry point with arguments, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["guide.py", *map(str, arguments)])
        return script.main()

    return run


def test_list(call: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list") == 0
    assert capsys.readouterr().out == "03_number: One number\n"


def test_the_cells_run_as_a_program(call: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    assert call("run", 3) == 0
    assert capfd.readouterr().out == "the backend is Agg\n"


def test_a_claim_that_does_not_hold_fails_at_its_line(
    call: Callable[..., int], script: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    page = script.GUIDE / "03_number.md"
    page.write_text(page.read_text().replace("number = 2", "number = 3"))
    line = page.read_text().splitlines().index('assert number == 2, "the number is another one"') + 1
    assert call("run", 3) == 1
    error = capfd.readouterr().err
    assert f'03_number.md", line {line}' in error
    assert "the number is another one" in error


@pytest.mark.parametrize("command", ["run", "notebook", "check"])
def test_a_chapter_that_does_not_exist(call: Callable[..., int], command: str) -> None:
    with pytest.raises(UserError, match="no chapter 4 in .*; the chapters: 03_number$"):
        call(command, 4)


def test_exercises_without_answers(call: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", 3) == 1
    assert capsys.readouterr().out == "".join(f"{name}: not answered yet\n" for name in ("double", "half", "square"))


def test_answers(call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = tmp_path / "mine.py"
    answers.write_text("def double(x):\n    return x + 2\n\n\ndef half(x):\n    return x / 0\n")
    assert call("check", 3, answers) == 1
    assert capsys.readouterr().out.splitlines() == [
        "double: double(3) is 5, and not 6",
        "half: ZeroDivisionError: division by zero (mine.py, line 6)",
        f"square: the file {answers} has no function square",
    ]
    answers.write_text("double = lambda x: 2 * x\n\n\ndef half(x):\n    x / 2\n\n\nsquare = lambda x: x**2\n")
    assert call("check", 3, answers) == 1
    assert capsys.readouterr().out.splitlines()[1] == "half: half returns None: expected a result"
    answers.write_text("double = lambda x: 2 * x\nhalf = lambda x: x / 2\nsquare = lambda x: x**2\n")
    assert call("check", 3, answers) == 0
    assert capsys.readouterr().out == "double: passed\nhalf: passed\nsquare: passed\n"


def test_files_that_cannot_be_read(call: Callable[..., int], script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none.py: expected a Python file"):
        call("check", 3, tmp_path / "none.py")
    (tmp_path / "broken.py").write_text("def double(x) return x\n")
    with pytest.raises(UserError, match="broken.py cannot be imported: SyntaxError"):
        call("check", 3, tmp_path / "broken.py")
    (script.GUIDE / "checks" / "ex03.py").unlink()
    with pytest.raises(UserError, match="chapter 3 has no exercises"):
        call("check", 3)


def test_a_notebook_has_the_cells(call: Callable[..., int], tmp_path: Path) -> None:
    jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed: pip install -e '.[docs]'")
    assert call("notebook", 3) == 0
    assert call("notebook", 3, "--out", tmp_path / "b.ipynb") == 0
    assert (tmp_path / "03_number.ipynb").exists()
    cells = jupytext.read(tmp_path / "b.ipynb").cells
    kinds = [cell.cell_type for cell in cells]
    assert kinds == ["markdown", "code", "markdown", "code"]
    assert cells[3].source == 'assert number == 2, "the number is another one"'
