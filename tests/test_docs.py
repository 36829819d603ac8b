"""The documentation: its links, and what its commands write."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|^ {4}.*?$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def broken_links(page: Path) -> list[str]:
    """The targets of the broken links of a page."""
    return [target for target in LINK.findall(CODE.sub("", page.read_text())) if not leads_somewhere(page, target)]


def leads_somewhere(page: Path, target: str) -> bool:
    """Whether the target of a link exists. Links to other sites are not checked."""
    if re.match(r"[a-z]+:", target):
        return True
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    return file.exists() and (not anchor or anchor in anchors(file.read_text()))


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them: lower case, hyphens for spaces, no punctuation."""
    titles = HEADING.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere(repo: Path) -> None:
    pages = [*repo.glob("*.md"), *repo.glob("[a-z]*/**/*.md")]
    broken = {str(page): links for page in pages if (links := broken_links(page))}
    assert len(pages) > 10
    assert not broken


def test_the_citation_the_readme_and_the_package_name_the_same_origins(repo: Path) -> None:
    path = repo / "CITATION.cff"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.citation-file-format", str(path)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    citation = yaml.safe_load(path.read_text())
    titles = [reference["title"].split(":")[0] for reference in citation["references"]]
    assert {"Mesh-Transformer-JAX", "DistJax", "JAXformer"} <= set(titles)
    first_lines = (repo / "README.md").read_text().partition("\n## ")[0]
    assert [one["url"] for one in citation["references"] if f"]({one['url']})" not in first_lines] == []
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    assert project["authors"] == citation["authors"]


# a line that is one link, one picture or one tag of HTML cannot be broken
WHOLE = re.compile(r"(- )?!?\[[^\]]*\]\([^)]*\)[.:]?|<[^>]*>")
COLUMNS = 120


def long_lines(text: str) -> list[int]:
    """The numbers of the lines of prose that end after COLUMNS. Tables, blocks of code, and links on their own do not
    count."""
    found, fenced = [], False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        code = fenced or line.startswith("    ") or line.lstrip().startswith("|")
        if len(line) > COLUMNS and not code and not WHOLE.fullmatch(line.strip()):
            found.append(number)
    return found


def test_lines_of_prose_end_at_120_columns(repo: Path) -> None:
    pages = [page for page in (*repo.glob("*.md"), *repo.glob("[a-z]*/**/*.md")) if "vendor" not in page.parts]
    assert len(pages) > 20
    assert not {str(page): lines for page in pages if (lines := long_lines(page.read_text()))}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a" * 120, []),
        ("a" * 121, [1]),
        ("- " + "a " * 60, [1]),
        (f"[{'a' * 80}](page.md) and [{'b' * 80}](page.md)", [1]),
        (f"![{'a ' * 60}](picture.png)\n<img src=x alt='{'a ' * 60}'>", []),
        ("| " + "a " * 60 + " |\n    python " + "a " * 60, []),
        ("```\n" + "a " * 61 + "\n```\n" + "a " * 61, [4]),
    ],
    ids=["120", "121", "item", "two links", "picture", "table and command", "fence"],
)
def test_a_long_line_is_found(text: str, expected: list[int]) -> None:
    assert long_lines(text) == expected


@pytest.mark.parametrize("target", ["other.md", "#no-heading", "page.md#no-heading"])
def test_a_broken_link_is_found(tmp_path: Path, target: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A heading, of `code`\n\n[here](#a-heading-of-code) [there]({target}) `[code](none)`\n")
    assert broken_links(page) == [target]


# what a command writes: the value of an option, or the target of a redirection
WRITTEN = re.compile(
    r"(?:--(?:out|output|output-path|output-dir|plot)[ =]|checkpoint\.model_dir=|mkdir -p |[^<-]> )([a-z][\w./-]*)"
)


def written(page: Path) -> set[str]:
    """The paths below the checkout that the commands of a page write, without docs/."""
    lines = re.findall(r"^ {4}.*$", page.read_text(), re.MULTILINE)
    paths = {path.rstrip("/") for line in lines for path in WRITTEN.findall(line)}
    return {path for path in paths if not path.startswith("docs/")} - {"data"}


def test_git_ignores_what_the_commands_write(repo: Path, tmp_path: Path) -> None:
    paths = set().union(*map(written, [repo / "README.md", *repo.glob("docs/*.md")]))
    assert {"runs/mine", "mine_hf", "pythia_native", "gptj_1/step_383500", "found.json", "pins.txt"} <= paths
    # of `pip wheel .`, of commands without an option for it, and a config that a page says to write
    paths |= {"build/lib", "preflight.png", "loss.png", "data/docs_8409.tfrecords", "pythia_docs.json"}
    paths |= {"shakespeare.json"}
    paths |= {"chat.json", "chat_bytes", "sums.jsonl"}
    # a pattern may be of folders only
    given = {path if Path(path).suffix else f"{path}/file" for path in paths}
    (tmp_path / ".gitignore").write_text((repo / ".gitignore").read_text())
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    asked = subprocess.run(
        ["git", "check-ignore", *given], cwd=tmp_path, text=True, stdout=subprocess.PIPE, check=False
    )
    assert given - set(asked.stdout.split()) == set()
