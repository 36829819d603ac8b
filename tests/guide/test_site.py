"""The site: it builds without a warning and without the network, and its links lead somewhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("sphinx_book_theme") is None,
        reason="the packages of the site are not installed: pip install -e '.[docs]'",
    ),
]
LINK = re.compile(r'(?:href|src)="([^":]+)"')


@pytest.fixture(scope="module")
def site(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without executing the chapters."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "scripts/guide.py", "build", "--out", str(out)],
        cwd=repo, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert not done.stderr
    return out


def test_every_page_is_in_the_site(site: Path, repo: Path) -> None:
    pages = [path.relative_to(repo / "docs").with_suffix(".html") for path in (repo / "docs").rglob("*.md")]
    assert len(pages) > 25
    assert not [str(page) for page in pages if not (site / page).exists()]


def test_generated_pages(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text()
    assert "usage: mesh-transformer train" in commands
    assert "usage: mesh-transformer tpu create" in commands
    assert "/v1/completions" in (site / "reference" / "http.html").read_text()
    python = (site / "reference" / "python.html").read_text()
    assert 'id="mesh_transformer.parallel.make_mesh"' in python
    assert "Alias for field number" not in python


def test_a_file_of_the_checkout_has_a_page(site: Path) -> None:
    assert 'href="files/deploy/slurm.sh.html"' in (site / "deploy.html").read_text()
    assert "SBATCH" in (site / "files" / "deploy" / "slurm.sh.html").read_text()


def test_every_link_leads_to_a_file(site: Path) -> None:
    broken = []
    for page in (path for path in site.rglob("*.html") if "_static" not in path.parts):
        for target in LINK.findall(page.read_text()):
            name = unquote(target.partition("#")[0].partition("?")[0])
            if name and not (page.parent / name).exists():
                broken.append(f"{page.relative_to(site)}: {target}")
    assert not broken


def test_no_page_scrolls_sideways_on_a_phone(site: Path, open_page: Any) -> None:
    """What is wide scrolls or wraps in itself."""
    pages = [path for path in site.rglob("*.html") if not {"_static", "files"} & set(path.relative_to(site).parts)]
    page = open_page("about:blank", viewport={"width": 390, "height": 844})
    wide = []
    for path in pages:
        page.goto(path.as_uri(), wait_until="load")
        if (width := page.evaluate("document.documentElement.scrollWidth")) > 390:
            wide.append((path.relative_to(site).as_posix(), width))
    assert len(pages) > 25
    assert not wide


def test_the_chapters_have_their_figures(site: Path, repo: Path) -> None:
    """Without an execution: the outputs are stored."""
    for chapter in sorted((repo / "docs/guide").glob("[0-9]*.md")):
        page = (site / "guide" / f"{chapter.stem}.html").read_text()
        assert 'src="../_images/' in page or "data:image/png" in page, chapter.name


def test_stored_outputs_are_of_the_code_of_their_chapters(repo: Path) -> None:
    """Otherwise the site would run the chapter, or show the outputs of other code: `scripts/guide.py store`."""
    jupytext, nbformat = pytest.importorskip("jupytext"), pytest.importorskip("nbformat")
    for chapter in sorted((repo / "docs/guide").glob("[0-9]*.md")):
        stored = nbformat.read(repo / "docs/guide/outputs" / f"{chapter.stem}.ipynb", 4)
        code = [cell.source for cell in jupytext.read(chapter).cells if cell.cell_type == "code"]
        assert [cell.source for cell in stored.cells] == code, chapter.name
        # of any machine
        assert not re.search(r"/(home|root|tmp|work)/", str([cell.outputs for cell in stored.cells])), chapter.name
