"""The blocks of a page of the documentation: commands, what the page prints after them, programs and other text."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = (
    "bash", "cat", "cd", "cp", "curl", "docker", "eval", "export", "gcloud", "kubectl", "lm_eval", "ls",
    "mesh-transformer", "mkdir", "pip", "pre-commit", "python", "ray", "sbatch", "source", "ssh", "sudo", "tail",
    "tensorboard",
)  # fmt: skip
"""First words of commands. A line that begins otherwise is text, such as the output of a command."""
_COMMAND = re.compile(rf"(\w+=\S* )*\(?(\S*/)?({'|'.join(PROGRAMS)}|umask) ")
_FENCE = re.compile(r"```(\w*)$")
_SAVED = re.compile(r"[Ss]ave th(?:is|e following) as `(\S+)`")
_IMPORT = re.compile(r"(import|from) \w")


@dataclass
class Block:
    """A command, a Python program or another text.

    Args:
        page: the path of the page, relative to the root.
        line: the number of its first line.
        kind: command, python, file, or text.
        text: without indentation; the lines of a command are joined.
        name: of the file as which the page tells the reader to save it.
        printed: of a command: the lines after it in the same block.
    """

    page: str
    line: int
    kind: str
    text: str
    name: str = ""
    printed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


def pages(root: Path) -> list[Path]:
    """The pages whose commands a reader types."""
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]


def blocks(root: Path, page: Path) -> list[Block]:
    """All blocks of a page, in order. Pictures that are written in mermaid are not blocks."""
    name = page.relative_to(root).as_posix()
    found: list[Block] = []
    for before, line, language, text in _chunks(page.read_text().splitlines()):
        if language == "mermaid":
            continue
        if saved := _SAVED.search(before):
            found.append(Block(name, line, "file", text, saved[1]))
        elif language == "python" or _IMPORT.match(text):
            found.append(Block(name, line, "python", text))
        else:
            found.extend(_commands(name, line, text))
    return found


def _chunks(lines: list[str]) -> Iterator[tuple[str, int, str, str]]:
    """Indented and fenced blocks: the paragraph before, the number of the first line, the language, the text."""
    place, paragraph = 0, ""
    while place < len(lines):
        line, before = lines[place], lines[place - 1] if place else ""
        if fence := _FENCE.match(line):
            end = lines.index("```", place + 1)
            yield paragraph, place + 2, fence[1], "\n".join(lines[place + 1 : end])
            place = end + 1
        elif line.startswith("    ") and not before.strip():
            end = place
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield paragraph, place + 1, "", textwrap.dedent("\n".join(lines[place:end])).rstrip()
            place = end
        else:
            paragraph = f"{paragraph} {line}" if before.strip() else line
            place += 1


def _commands(page: str, line: int, text: str) -> Iterator[Block]:
    """The commands of a block with the lines printed after each, or the block as one text."""
    lines = text.splitlines()
    found: list[Block] = []
    place = 0
    while place < len(lines):
        first, joined = place, lines[place].removeprefix("$ ")
        while joined.endswith("\\"):
            place += 1
            joined = f"{joined[:-1].rstrip()} {lines[place].strip()}"
        if _COMMAND.match(f"{joined} "):
            found.append(Block(page, line + first, "command", _without_comment(joined)))
        elif found:
            found[-1].printed.extend(line for line in lines[first : place + 1] if line.strip())
        else:
            yield Block(page, line, "text", text)
            return
        place += 1
    yield from found


def _without_comment(command: str) -> str:
    return re.sub(r"\s+# .*$", "", command)
