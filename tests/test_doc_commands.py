"""Every command of README, CONTRIBUTING and docs runs as printed, in the order of its page, and prints what the page
says; the exceptions stand in `support/doc_table.py` with their reasons."""

from dataclasses import replace
from pathlib import Path

import pytest
from support import doc_shell, doc_table
from support.commands import REPO
from support.doc_blocks import Block, blocks, pages

TIMEOUT_S = 900
DAILY = [
    "CONTRIBUTING.md",
    "docs/experts.md",
    "docs/library.md",
]
# each takes 20 to 160 s of CPU
NIGHTLY = [
    "README.md",
    "docs/chat.md",
    "docs/checkpoints.md",
    "docs/data.md",
    "docs/evaluate.md",
    "docs/finetune.md",
    "docs/lora.md",
    "docs/first_chat.md",
    "docs/install.md",
    "docs/parallelism.md",
    "docs/runs.md",
    "docs/serve.md",
]


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


@pytest.mark.parametrize("page", [*DAILY, *(pytest.param(page, marks=pytest.mark.nightly) for page in NIGHTLY)])
def test_a_page(page: str, tmp_path: Path) -> None:
    checkout = doc_shell.clone(REPO, tmp_path / "clone")
    doc_shell.run(run_by_tests(page), checkout, tmp_path / "logs", TIMEOUT_S)
    assert [name for name in doc_table.WRITTEN.get(page, ()) if not any(checkout.glob(name))] == []


def test_every_page_with_a_command_is_run() -> None:
    """A block that is neither run nor listed belongs to one of these pages."""
    assert {page for page in PAGES if run_by_tests(page)} == {*DAILY, *NIGHTLY}


@pytest.mark.parametrize("table", ["NOT_RUN", "TEXT", "AGAIN", "SHORTER"])
def test_every_entry_of_the_tables_has_a_block(table: str) -> None:
    found = [block for page in PAGES for block in blocks(REPO, REPO / page)]
    entries = getattr(doc_table, table)
    assert [entry for entry in entries if not any(doc_table.find({entry: ""}, block) for block in found)] == []
