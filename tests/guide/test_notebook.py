"""notebooks/: each notebook is its text, and the text runs on a CPU."""

import shutil
from pathlib import Path

import pytest
from support.guide import guide

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_made_from_its_text(repo: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("jupytext", reason="jupytext is not installed: pip install -e '.[docs]'")
    text, made = f"notebooks/{name}.md", tmp_path / "made.ipynb"
    assert guide(repo, "notebook", text, "--out", str(made)).returncode == 0
    assert (FOLDER / f"{name}.ipynb").read_text() == made.read_text(), (
        f"the text has changed: run python scripts/guide.py notebook {text} --out notebooks/{name}.ipynb"
    )


@pytest.mark.nightly
@pytest.mark.guide
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_cells_run_and_their_claims_hold(repo: Path, tmp_path: Path, name: str) -> None:
    """In an empty folder, because the cells write beside the page."""
    page = shutil.copy(FOLDER / f"{name}.md", tmp_path)
    done = guide(repo, "run", str(page))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    # the cells that need other machines say so
    assert done.stdout.count("skipped: this needs") == (2 if name == "finetune_and_sample" else 0)
