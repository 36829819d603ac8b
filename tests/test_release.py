"""The script of a release, in a small git repository."""

import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "pyproject.toml": '[project]\nname = "a"\nversion = "1.0.0"\n\n[tool.b]\nversion = "7"\n',
    "mesh_transformer/__init__.py": '"""A."""\n\n__version__ = "1.0.0"\n',
    "CITATION.cff": "cff-version: 1.2.0\nversion: 1.0.0\ntype: software\n",
    "CHANGELOG.md": (
        "# Changelog\n\n## 1.0.0 - 2020-01-02\n\n### Added\n\n- a thing\n\n## 0.9.0 - 2019-01-02\n\n- old\n"
    ),
    "README.md": "# A\n\n## Start\n\n    pip install a\n\n## More\n\nrest\n",
    "docs/preflight.md": "# B\n\n## What a slice will do\n\n| v3-8 |\n|---|\n\n## More\n\nrest\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of two commits, whose files name version 1.0.0."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "Ada")
    git(tmp_path, "tag", "v0.9.0")
    (tmp_path / "README.md").write_text(FILES["README.md"] + "more\n")
    commit(tmp_path, "Grace")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=T", "-c", "user.email=t@t", *arguments],
        cwd=folder, text=True, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return done.stdout


def commit(folder: Path, author: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", f"--author={author} <a@a>", "--message=c")


def release(repo: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # the tag needs a name
    names = {"GIT_COMMITTER_NAME": "T", "GIT_COMMITTER_EMAIL": "t@t", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, repo / "scripts/release.py", *arguments]
    return subprocess.run(command, cwd=folder, env=names, capture_output=True, text=True, check=False)


def test_one_version_in_a_clean_tree_can_be_tagged(repo: Path, checkout: Path) -> None:
    done = release(repo, checkout, "check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1.0.0 can be tagged\n", "")


@pytest.mark.parametrize(
    ("file", "old", "new", "reason"),
    [
        ("CITATION.cff", "1.0.0", "1.0.1", "__init__.py 1.0.0, CITATION.cff 1.0.1, CHANGELOG.md 1.0.0"),
        ("pyproject.toml", '"1.0.0"', '"1.1.0"', "pyproject.toml 1.1.0"),
        ("mesh_transformer/__init__.py", '"1.0.0"', '"1.1.0"', "__init__.py 1.1.0"),
        ("CHANGELOG.md", "## 1.0.0", "## Unreleased\n\n- new\n\n## 1.0.0", "CHANGELOG.md Unreleased"),
    ],
)
def test_versions_that_differ_are_refused(
    repo: Path, checkout: Path, file: str, old: str, new: str, reason: str
) -> None:
    (checkout / file).write_text(FILES[file].replace(old, new, 1))
    commit(checkout, "Ada")
    for arguments in (["check"], ["notes", "--tag"]):
        done = release(repo, checkout, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert reason in done.stderr
    assert git(checkout, "tag") == "v0.9.0\n"


def test_a_tree_with_changes_is_refused(repo: Path, checkout: Path) -> None:
    (checkout / "new.py").touch()
    done = release(repo, checkout, "check")
    assert (done.returncode, done.stderr) == (2, "error: not committed: ?? new.py\n")


def test_the_notes_have_the_section_figures_installation_and_authors(repo: Path, checkout: Path) -> None:
    expected = (
        "# v1.0.0\n\n### Added\n\n- a thing\n\n## What a slice will do\n\n| v3-8 |\n|---|\n\n"
        "## Start\n\n    pip install a\n\n## Commits\n\n1 commit since v0.9.0, by Grace (1).\n"
    )
    assert release(repo, checkout, "notes").stdout == expected
    assert release(repo, checkout, "notes", "--notes", ".git/notes.md", "--tag").returncode == 0
    assert (checkout / ".git/notes.md").read_text() == expected
    assert git(checkout, "tag", "--list", "v1.0.0", "--format=%(contents)").strip() == expected.strip()
    # the notes of a tag that exists are the same, but the tag is not made twice
    assert release(repo, checkout, "notes").stdout == expected
    again = release(repo, checkout, "notes", "--tag")
    assert (again.returncode, again.stdout) == (2, "")
    assert "already exists" in again.stderr


def test_without_an_earlier_tag_all_commits_count(repo: Path, checkout: Path) -> None:
    git(checkout, "tag", "--delete", "v0.9.0")
    assert "2 commits, by " in release(repo, checkout, "notes").stdout


def test_bump_sets_the_version_of_all_files(repo: Path, checkout: Path) -> None:
    changelog = FILES["CHANGELOG.md"].replace("## 1.0.0", "## Unreleased\n\n- new\n\n## 1.0.0")
    (checkout / "CHANGELOG.md").write_text(changelog)
    assert release(repo, checkout, "bump", "1.1.0").returncode == 0
    # not the version of the format of CITATION.cff, nor that of another table
    for name in ("pyproject.toml", "mesh_transformer/__init__.py", "CITATION.cff"):
        assert (checkout / name).read_text() == FILES[name].replace("1.0.0", "1.1.0")
    commit(checkout, "Ada")
    assert release(repo, checkout, "check").stdout == "1.1.0 can be tagged\n"
    assert "- new" in release(repo, checkout, "notes").stdout


@pytest.mark.parametrize(
    ("version", "reason"),
    [("1.1", "three numbers"), ("1.1.0", "CHANGELOG.md has no heading")],
    ids=["version", "changelog"],
)
def test_a_bump_that_is_refused_changes_nothing(repo: Path, checkout: Path, version: str, reason: str) -> None:
    done = release(repo, checkout, "bump", version)
    assert done.returncode == 2
    assert reason in done.stderr
    assert git(checkout, "status", "--porcelain") == ""


def test_the_files_of_this_repository_agree(repo: Path) -> None:
    """The tree may have changes here, and a changelog between two releases."""
    done = release(repo, repo, "notes")
    assert done.returncode == 0, done.stderr
    assert "| v3-8 |" in done.stdout
    assert "## Start" in done.stdout
