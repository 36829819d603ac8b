"""Every relative link of the documentation leads to an existing file, and to a heading of that page."""

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("target", ["other.md", "#no-heading", "page.md#no-heading"])
def test_a_broken_link_is_found(tmp_path: Path, target: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A heading, of `code`\n\n[here](#a-heading-of-code) [there]({target}) `[code](none)`\n")
    assert broken_links(page) == [target]
