"""The limits of the code's size (scripts/budgets.toml), and the script that compares them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import budgets, traced_files

SOURCE = '''"""A module."""

from typing import Any  # a comment behind code

# a comment


class Thing:
    """A class.

    With a second line.
    """

    field: Any = None
    """A docstring below a field."""

    text = """
    two lines of a value, and a blank one

    """

    def call(
        self, given: "dict[str, int]",
    ) -> "list[int]":
        return [given[name] for name in sorted(given)]  # another


def other(x: typing.Any) -> list[Any]: ...
'''


def test_what_a_code_line_is() -> None:
    # the import; class, field, four of the text, four of the method; the function
    assert budgets.code_lines(SOURCE) == 1 + 1 + 1 + 4 + 4 + 1
    assert budgets.uses_of_any(SOURCE) == 3


def test_the_files_of_a_step_are_those_that_are_entered() -> None:
    entered, tracer = {}, sys.gettrace()
    for run in traced_files.forward, traced_files.step:
        entered[run] = traced_files.Entered()
        run(entered[run])
    forward, step = (set(one.files) for one in entered.values())
    assert {"models/block.py", "ops/linear.py"} <= forward < step
    assert "train/step.py" in step - forward
    assert not [name for name in step if name.startswith(("checkpoint/", "infer/", "families/"))]
    assert sys.gettrace() is tracer


def test_a_page_lists_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"above\n{traced_files.BEGIN}old\n{traced_files.END}below\n")
    page.write_text(traced_files.render(page, ["accelerators.py", "ops/attend/causal.py", "ops/linear.py"]))
    lines = ["- `accelerators.py`", "- `ops/`: `attend/causal.py`, `linear.py`"]
    expected = ["above", traced_files.BEGIN.strip(), "", *lines, "", traced_files.END.strip(), "below"]
    assert page.read_text().splitlines() == expected
    monkeypatch.setattr(traced_files, "ROOT", tmp_path)
    monkeypatch.setattr(traced_files, "PAGES", {traced_files.STEP: page})
    files = ["accelerators.py", "ops/attend/causal.py", "ops/linear.py"]
    assert traced_files.outdated({traced_files.STEP: files}) == []
    assert traced_files.outdated({traced_files.STEP: files[1:]}) == [
        "page.md lists other files than run: python scripts/traced_files.py --write"
    ]


def test_readers_are_sent_to_files_that_run(repo: Path) -> None:
    """The pages and the model name a few of the files, in the order in which to read them."""
    pages = [(repo / "docs" / name).read_text() for name in ("training_step.md", "served_request.md")]
    model = (repo / "mesh_transformer/models/model.py").read_text()
    few = [(page, page.split("A first reader needs ten")[1].split("\n\n")[0], 10) for page in pages]
    for page, text, count in [*few, (pages[0], model.split("What is unusual")[0], 3)]:
        names, listed = re.findall(r"\b(?!docs)(\w+)/([\w/]+\.py)", text), page.split(traced_files.END)[0]
        assert len(names) == count
        assert not [name for folder, name in names if not re.search(rf"- `{folder}/`:[^-]*`{name}`", listed)]


def test_every_folder_of_code_is_counted(repo: Path) -> None:
    figures = budgets.of_the_sources()
    folders = {f"mesh_transformer/{file.parent.name}" for file in repo.glob("mesh_transformer/*/__init__.py")}
    assert folders <= figures[budgets.LINES].keys()
    parts = [lines for name, lines in figures[budgets.LINES].items() if name != budgets.TOTAL]
    assert sum(parts) == figures[budgets.LINES][budgets.TOTAL]
    assert set(figures[budgets.ANY]) == {f"mesh_transformer/{name}" for name in budgets.CORE_FOLDERS} | {budgets.CORE}


LIMITS = {budgets.FILES: {"a": 10, "b": 20}, budgets.ANY: {"a": 1.5}}


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({budgets.FILES: {"a": 10, "b": 1}, budgets.ANY: {"a": 1.5}, budgets.LINES: {"a": 10**6}}, []),
        (
            {budgets.FILES: {"a": 11, "b": 20}},
            ["files, a: rose to 11, over the limit 10", "in a commit that says why"],
        ),
        ({budgets.ANY: {"a": 1.6}}, ["Any per thousand code lines, a: rose to 1.6, over the limit 1.5"]),
        ({budgets.FILES: {"a": 1, "b": 1, "c": 1}}, ["files, c: 1 has no limit"]),
        ({budgets.FILES: {"a": 1}}, ["files, b: scripts/budgets.toml has a limit, but there is no such figure"]),
    ],
)
def test_a_rise_is_a_fault(figures: budgets.Figures, expected: list[str]) -> None:
    found = list(budgets.faults(figures, LIMITS))
    assert len(found) == min(len(expected), 1)
    assert all(text in found[0] for text in expected)
    assert budgets.table(figures, LIMITS, None).count("\n") == sum(map(len, figures.values()))


def test_code_lines_are_compared_with_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str, at: int = 0) -> None:
        dates = {"GIT_AUTHOR_DATE": f"@{at} +0000", "GIT_COMMITTER_DATE": f"@{at} +0000"}
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, env=os.environ | dates)

    monkeypatch.setattr(budgets, "ROOT", tmp_path)
    assert budgets.landed() is None
    code = tmp_path / "mesh_transformer/ops/x.py"
    code.parent.mkdir(parents=True)
    git("init", "-q")
    first = 1_700_000_000
    for at, text in (
        (first, "x = 1\n"),
        (first + 9_000_000, "x = 1\ny = 2\n"),
        (first + 9_000_060, "x = 1\ny = 2\nz = 3\n"),
    ):
        code.write_text(text)
        git("add", "-A")
        git("commit", "-qm", "x", at=at)
    base = budgets.landed()
    assert base is not None
    before = budgets.lines_of(budgets.sources_at(base))
    assert before == {"mesh_transformer/ops": 1, "total": 1}
    now = {budgets.LINES: budgets.lines_of(budgets.sources())}
    assert [line.split()[-2:] for line in budgets.table(now, {}, before).splitlines()[1:]] == [["3", "+2"]] * 2


def test_recorded_limits_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {budgets.LINES: {"a": 101}, budgets.ANY: {"a": 1.1}, budgets.FILES: {"c": 7}}
    monkeypatch.setattr(budgets, "LIMITS", tmp_path / "budgets.toml")
    budgets.LIMITS.write_text(budgets.as_toml(budgets.rounded_up(figures)))
    assert budgets.limits() == {budgets.ANY: {"a": 1.5}, budgets.FILES: {"c": 7}}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A rise and a page with other limits are errors. --record and --write change files."""
    page, limits = tmp_path / "page.md", tmp_path / "budgets.toml"
    page.write_text(budgets.PAGE.read_text())
    limits.write_text(budgets.LIMITS.read_text())
    monkeypatch.setattr(budgets, "PAGE", page)
    monkeypatch.setattr(budgets, "LIMITS", limits)
    monkeypatch.setattr(sys, "path", [*sys.path])
    figures = budgets.limits()
    outdated: list[str] = []
    monkeypatch.setattr(budgets, "measured", lambda: (figures, outdated))
    monkeypatch.setattr(budgets, "landed", lambda: None)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["budgets.py", *arguments])
        return budgets.main(), capsys.readouterr().out.splitlines()[-1]

    assert run()[0] == 0
    outdated.append("page.md lists other files")
    assert run() == (1, "page.md lists other files")
    outdated.clear()
    figures[budgets.FILES][budgets.SERVER] += 7
    code, line = run()
    assert (code, f"{budgets.SERVER}: rose to" in line) == (1, True)
    assert run("--record")[0] == run()[0] == 0
    limits.write_text(limits.read_text().replace('spec" = ', 'spec" = 1'))
    code, line = run()
    assert (code, "run scripts/budgets.py --write" in line) == (1, True)
    assert run("--write")[0] == run()[0] == 0
