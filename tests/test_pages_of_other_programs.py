"""The pages for people who come from other programs name options and fields of ours that exist."""

import re
import runpy
import sys
from collections.abc import Iterator
from functools import cache

import pytest
from support.commands import REPO

from mesh_transformer.commands import COMMANDS
from mesh_transformer.config.schema import GROUPS

PAGES = ("from_2021", "from_maxtext_levanter", "from_megatron_torchtitan", "from_transformers")
CODE = re.compile(r"`([^`]+)`")
FIELD = re.compile(rf"\b((?:{'|'.join(GROUPS)})\.[a-z]\w*)(?!\.)\b")


def ours(text: str) -> Iterator[str]:
    """The code in the columns `here` of the tables of a page; where this column says "the same", the first one's."""
    column = None
    for line in text.splitlines():
        if not line.startswith("|"):
            column = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if column is None:
            column = cells.index("here") if "here" in cells else -1
        elif column >= 0:
            yield from CODE.findall(cells[column])
            if cells[column].startswith("the same"):
                yield from CODE.findall(cells[0])


@cache
def fields() -> set[str]:
    """The fields of all families and optimizers."""
    return set(re.findall(r"^[|-] `(\w+\.\w+)", (REPO / "docs/config.md").read_text(), re.MULTILINE))


def unknown_fields(code: str) -> list[str]:
    return [name for name in FIELD.findall(code) if name not in fields()]


def commands(codes: Iterator[str]) -> Iterator[tuple[str, list[str]]]:
    """The scripts that the code calls, and the options of each call."""
    for code in codes:
        if found := re.match(r"(?:python3? )?(\w+)\.py\b(.*)", code):
            yield found[1], re.findall(r"(?<!\S)--[a-z][\w-]*", found[2])


@pytest.mark.parametrize("page", PAGES)
def test_fields_exist(page: str) -> None:
    codes = list(ours((REPO / f"docs/{page}.md").read_text()))
    assert len(codes) > 20
    assert {code: unknown for code in codes if (unknown := unknown_fields(code))} == {}


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_package_exist(page: str) -> None:
    named = re.findall(r"`mesh-transformer ([a-z][\w-]*)`", (REPO / f"docs/{page}.md").read_text())
    assert set(named) <= set(COMMANDS)
    assert named or page not in ("from_2021", "from_transformers")


def test_options_exist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    used: dict[str, set[str]] = {}
    for page in PAGES:
        for script, options in commands(ours((REPO / f"docs/{page}.md").read_text())):
            used.setdefault(script, set()).update(options)
    assert len(used) > 8
    for script, options in used.items():
        # of tpu_utils.py the pages call one action
        arguments = ["create"] if script == "tpu_utils" else []
        monkeypatch.setattr(sys, "argv", [script, *arguments, "--help"])
        with pytest.raises(SystemExit):
            runpy.run_path(str(REPO / f"{script}.py"))["main"]()
        assert options <= set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out)), script


@pytest.mark.parametrize(
    ("code", "unknown"),
    [
        ("mesh.fsdp", []),
        ("mesh.fsdp=2", []),
        ("mesh.rings", ["mesh.rings"]),
        ("model.rotary_dims", []),
    ],
)
def test_an_unknown_field_is_found(code: str, unknown: list[str]) -> None:
    assert unknown_fields(code) == unknown


def test_only_our_column_is_read() -> None:
    table = "| theirs | here |\n|---|---|\n| `optimizer.learning_rate` | `optimizer.lr` |\n| `train.py` | the same |\n"
    other = "| a | b |\n|---|---|\n| `c` | `d` |\n"
    assert list(ours(f"{table}\n{other}")) == ["optimizer.lr", "train.py"]
