"""Every command of README, CONTRIBUTING and docs runs as printed, in the order of its page, and prints what the page
says; the exceptions stand in `support/doc_table.py` with their reasons."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from support import doc_shell, doc_table
from support.commands import REPO
from support.covering import sampled
from support.doc_blocks import Block, blocks, pages

TIMEOUT_S = 900
# CPU seconds of each page
SECONDS = {
    "README.md": 160,
    "CONTRIBUTING.md": 2,
    "docs/chat.md": 150,
    "docs/checkpoints.md": 30,
    "docs/data.md": 100,
    "docs/evaluate.md": 35,
    "docs/experts.md": 25,
    "docs/finetune.md": 60,
    "docs/install.md": 40,
    "docs/library.md": 10,
    "docs/parallelism.md": 150,
    "docs/preflight.md": 5,
    "docs/runs.md": 60,
    "docs/serve.md": 55,
}
# a page that takes longer is run by `-m matrix` only, so that the default run has less than 30 s of a turn's share
LONGEST = 60


def of(page: str) -> list[Block]:
    """The blocks that are commands, programs, files, or an output, which belongs to the command before it."""
    found: list[Block] = []
    for block in blocks(REPO, REPO / page):
        if block.kind != "text":
            found.append(block)
        elif not doc_table.find(doc_table.TEXT, block):
            assert found, f"{block}: an output without a command: doc_table.TEXT says what other texts are"
            if doc_table.find(doc_table.AGAIN, block):
                found.append(replace(found[-1], printed=[]))
            found[-1].printed += block.text.splitlines()
    return found


def run_by_tests(page: str) -> list[Block]:
    before = [Block(page, 0, "command", command) for command in doc_table.BEFORE.get(page, ())]
    return before + [block for block in of(page) if not doc_table.find(doc_table.NOT_RUN, block)]


PAGES = [page.relative_to(REPO).as_posix() for page in pages(REPO)]


def cases() -> list:
    """Each page is a product of its own, because each has its own time. A change of the page selects it."""
    long = [page for page, seconds in SECONDS.items() if seconds > LONGEST]
    short = [sampled([page], seconds=SECONDS[page], files=(f"../{page}",)) for page in SECONDS if page not in long]
    return [
        *itertools.chain.from_iterable(short),
        *(pytest.param(page, marks=[pytest.mark.matrix, pytest.mark.unsampled]) for page in long),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", cases())
def test_a_page(page: str, tmp_path: Path) -> None:
    checkout = doc_shell.clone(REPO, tmp_path / "clone")
    doc_shell.run(run_by_tests(page), checkout, tmp_path / "logs", TIMEOUT_S)
    assert [name for name in doc_table.WRITTEN.get(page, ()) if not any(checkout.glob(name))] == []


def test_every_page_with_a_command_is_run() -> None:
    """A block that is neither run nor listed belongs to a page that SECONDS has."""
    assert [page for page in PAGES if run_by_tests(page)] == list(SECONDS)


@pytest.mark.parametrize("table", ["NOT_RUN", "TEXT", "AGAIN", "SHORTER"])
def test_every_entry_of_the_tables_has_a_block(table: str) -> None:
    found = [block for page in PAGES for block in blocks(REPO, REPO / page)]
    entries = getattr(doc_table, table)
    assert [entry for entry in entries if not any(doc_table.find({entry: ""}, block) for block in found)] == []
