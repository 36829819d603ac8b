"""The chapters of the guide: each runs, its answers pass its checks, and its exercises are unanswered."""

import ast
import re
from pathlib import Path

import pytest
from support.covering import covering
from support.guide import guide

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
CHAPTERS = [path.stem for path in sorted(GUIDE.glob("[0-9][0-9]_*.md"))]

pytestmark = pytest.mark.guide


def functions(folder: str, chapter: str) -> list[str]:
    """The public functions of a file of a chapter; none if it has no such file."""
    file = GUIDE / folder / f"ex{chapter[:2]}.py"
    nodes = ast.parse(file.read_text()).body if file.exists() else []
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]


@pytest.mark.nightly
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_cells_run_and_their_claims_hold(repo: Path, chapter: str) -> None:
    done = guide(repo, "run", chapter[:2])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    "chapter", covering([one for one in CHAPTERS if functions("checks", one)], daily=(CHAPTERS[:1],))
)
def test_our_answers_pass_and_the_exercises_are_unanswered(repo: Path, chapter: str) -> None:
    number = chapter[:2]
    names = [name.removeprefix("check_") for name in functions("checks", chapter) if name.startswith("check_")]
    answered = guide(repo, "check", number, f"docs/guide/answers/ex{number}.py")
    assert answered.stdout.splitlines() == [f"{name}: passed" for name in names], answered.stderr[-4000:]
    empty = guide(repo, "check", number)
    assert empty.stdout.splitlines() == [f"{name}: not answered yet" for name in names], empty.stderr[-4000:]
    assert (answered.returncode, empty.returncode) == (0, 1)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_has_its_parts(chapter: str) -> None:
    text = (GUIDE / f"{chapter}.md").read_text()
    assert {"In the code", "Exercises"} <= set(re.findall(r"^## (.+)$", text, re.MULTILINE))
    checked = {name.removeprefix("check_") for name in functions("checks", chapter) if name.startswith("check_")}
    assert len(checked) >= 2
    assert checked <= set(functions("exercises", chapter)) & set(functions("answers", chapter))
