"""Command lines for the shells of the hosts. This module quotes every value in them."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HomePath:
    """A path below the home folder, which only the shell of the host knows. `prefix` is text before the path."""

    path: str
    prefix: str = ""


Word = str | HomePath


def join(*words: Word) -> str:
    """A command line that a POSIX shell splits into exactly these words."""
    return " ".join(_quoted(word) for word in words)


def line_of(words: Sequence[str]) -> str:
    """The command line of a user. One word is a line for a shell; several words are a program and its arguments,
    unchanged."""
    return words[0] if len(words) == 1 else join(*words)


def below(folder: Word, path: str) -> Word:
    """A path below a folder."""
    return HomePath(f"{folder.path}/{path}", folder.prefix) if isinstance(folder, HomePath) else f"{folder}/{path}"


def _quoted(word: Word) -> str:
    if isinstance(word, str):
        return shlex.quote(word)
    return f'{shlex.quote(word.prefix) if word.prefix else ""}"$HOME"/{shlex.quote(word.path)}'
