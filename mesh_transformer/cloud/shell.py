"""Command lines for the hosts' shells. Every value that goes into one is quoted here."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Home:
    """A path below the home folder of whoever logs in, which only the host's shell knows; `before` is put before it."""

    path: str
    before: str = ""


Word = str | Home


def join(*words: Word) -> str:
    """A command line that a POSIX shell reads as exactly these words."""
    return " ".join(_quoted(word) for word in words)


def line_of(words: Sequence[str]) -> str:
    """The line of a user's command: one word is a line for a shell; several are a program and its arguments, as they were given."""
    return words[0] if len(words) == 1 else join(*words)


def below(folder: Word, path: str) -> Word:
    """A path below a folder."""
    return Home(f"{folder.path}/{path}", folder.before) if isinstance(folder, Home) else f"{folder}/{path}"


def _quoted(word: Word) -> str:
    if isinstance(word, str):
        return shlex.quote(word)
    return f'{shlex.quote(word.before) if word.before else ""}"$HOME"/{shlex.quote(word.path)}'
