"""Check a release, write the notes of its tag, and set its version.

    python scripts/release.py check          # is the tree clean, and the version the same in the four files?
    python scripts/release.py notes          # what changed, figures, how to install, commits and contributors
    python scripts/release.py bump 2.1.0     # write the version to the four files

The files are pyproject.toml, mesh_transformer/__init__.py, CITATION.cff and CHANGELOG.md. `notes --tag` also makes the
tag vVERSION, after the check. Nothing is pushed. Exit code 2: the files do not agree, or git refuses.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

PROJECT, CHANGELOG = "pyproject.toml", "CHANGELOG.md"
VERSION = re.compile(r"\d+\.\d+\.\d+")
# the line of a file that names the version; the first one counts
LINES = {
    PROJECT: re.compile(r'^version = "(.*)"$', re.MULTILINE),
    "mesh_transformer/__init__.py": re.compile(r'^__version__ = "(.*)"$', re.MULTILINE),
    "CITATION.cff": re.compile(r"^version: (.*)$", re.MULTILINE),
}
UNRELEASED = re.compile(r"^## Unreleased.*$", re.MULTILINE)
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
# sections that the notes repeat, and their pages
COPIED = {"What a slice will do": "docs/preflight.md", "Start": "README.md"}


class Refused(Exception):
    """A release that cannot be made; one line for each reason."""


def git(folder: Path, *arguments: str) -> str:
    """The output of a git command.

    Raises:
        Refused: git ends with an error.
    """
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def section(page: str, title: str) -> str:
    """The text below the heading `## TITLE`, or `## TITLE - DATE`, of a Markdown page.

    Raises:
        Refused: there is no such heading, or nothing below it.
    """
    heading = re.compile(rf"^## {re.escape(title)}( - .*)?\n", re.MULTILINE)
    found = heading.search(page)
    text = HEADING.split(page[found.end() :], maxsplit=1)[0].strip("\n") if found else ""
    if not text:
        raise Refused(f"no text below a heading '## {title}'")
    return text


def versions(root: Path) -> dict[str, str]:
    """The version that each file names: CHANGELOG.md by its first heading, which may be `Unreleased`."""
    lines = {file: line.search(_read(root, file)) for file, line in LINES.items()}
    heading = HEADING.search(_read(root, CHANGELOG))
    found = {file: line[1] if line else "none" for file, line in lines.items()}
    return found | {CHANGELOG: heading[1].partition(" - ")[0] if heading else "none"}


def check(root: Path) -> str:
    """The version of a release that can be made.

    Raises:
        Refused: the tree has changes, or the files name several versions, or one that is no release.
    """
    reasons = [f"not committed: {line}" for line in git(root, "status", "--porcelain").splitlines()]
    found = versions(root)
    version = found[PROJECT]
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{file} {named}" for file, named in found.items())
        reasons.append(f"different versions: {listed}; set one with `bump VERSION`")
    elif not VERSION.fullmatch(version):
        reasons.append(f"{version} is no release: expected three numbers, such as 2.1.0")
    if reasons:
        raise Refused("\n".join(reasons))
    return version


def notes(root: Path, version: str) -> str:
    """The notes of a tag: the changelog's section, the copied sections of pages, commits and contributors."""
    own = f"v{version}"
    try:
        before = git(root, "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "--exclude", own)
    except Refused:
        # the first release has all commits
        before = ""
    authors = Counter(git(root, "log", "--format=%aN", f"{before}..HEAD" if before else "HEAD").splitlines())
    since = f" since {before}" if before else ""
    people = ", ".join(f"{name} ({count:,})" for name, count in authors.most_common())
    parts = [f"# {own}", section(_read(root, CHANGELOG), version)]
    parts += [f"## {title}\n\n{section(_read(root, page), title)}" for title, page in COPIED.items()]
    commits = "1 commit" if authors.total() == 1 else f"{authors.total():,} commits"
    parts.append(f"## Commits\n\n{commits}{since}, by {people}.")
    return "\n\n".join(parts) + "\n"


def bump(root: Path, version: str) -> None:
    """Write the version to the four files. The section `Unreleased` of the changelog becomes the version's, with
    today's date (UTC).

    Raises:
        Refused: the version is not three numbers, or a file has no line for it. Nothing is written then.
    """
    if not VERSION.fullmatch(version):
        raise Refused(f"version {version!r}: expected three numbers, such as 2.1.0")
    today = datetime.now(UTC).date().isoformat()
    changed = {}
    for file, line in LINES.items():
        text = _read(root, file)
        old = line.search(text)
        if old is None:
            raise Refused(f"{file} has no line {line.pattern}")
        changed[file] = text[: old.start(1)] + version + text[old.end(1) :]
    changed[CHANGELOG], count = UNRELEASED.subn(f"## {version} - {today}", _read(root, CHANGELOG), count=1)
    if not count:
        raise Refused(f"{CHANGELOG} has no heading '## Unreleased'")
    for file, text in changed.items():
        (root / file).write_text(text, encoding="utf-8")


def _read(root: Path, file: str) -> str:
    return (root / file).read_text(encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the three commands in the checkout of the current folder. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="is the tree clean, and the version the same in all files?")
    write = commands.add_parser("notes", help="print the notes of the tag")
    write.add_argument("--notes", metavar="FILE", help="write them to FILE")
    write.add_argument("--tag", action="store_true", help="check, and make the tag with these notes")
    commands.add_parser("bump", help="set the version").add_argument("version", metavar="VERSION")
    given = parser.parse_args(arguments)
    try:
        root = Path(git(Path.cwd(), "rev-parse", "--show-toplevel"))
        if given.command == "bump":
            bump(root, given.version)
        elif given.command == "check":
            sys.stdout.write(f"{check(root)} can be tagged\n")
        else:
            _write_notes(root, given.notes, given.tag)
    except Refused as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _write_notes(root: Path, file: str | None, tag: bool) -> None:
    version = check(root) if tag else versions(root)[PROJECT]
    text = notes(root, version)
    if tag:
        # headings begin with #, which git would take for comments
        git(root, "tag", "--annotate", "--cleanup=whitespace", f"--message={text}", f"v{version}")
    if file is None:
        sys.stdout.write(text)
    else:
        Path(file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
