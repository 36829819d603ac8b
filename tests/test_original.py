"""The shipped part of the original program's numbers equals the full set; the tests report what is skipped."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import golden
import numpy as np
from support.summary import NO_SHARED

MOST_BYTES = 6_000_000


def files(folder: Path) -> Iterator[str]:
    """Names of all files below a folder."""
    yield from (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def arrays(path: Path) -> dict[str, np.ndarray]:
    file = np.load(path, allow_pickle=False)
    return {key: file[key] for key in file.files}


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether type, shape and bytes are equal."""
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()


def test_it_is_small(repo: Path) -> None:
    assert sum(path.stat().st_size for path in (repo / "tests/golden").glob("*.*")) <= MOST_BYTES


def test_what_is_shipped_is_the_originals(original: Path, shared: Path) -> None:
    """Whole checkpoints, some of the files of named arrays, and no moments of the one-shard checkpoint."""
    one_shard = "mp1/ckpt_params/step_5/shard_0"
    shipped = sorted(files(original))
    assert len(shipped) > 300
    for name in shipped:
        # the page in `shared` also tells of folders that are not shipped
        if name.startswith(one_shard) or name == "README.md":
            continue
        theirs = shared / "golden" / name
        if "shard_" in name or not name.endswith(".npz"):
            assert (original / name).read_bytes() == theirs.read_bytes(), name
        else:
            ours, whole = arrays(original / name), arrays(theirs)
            assert ours
            assert not [key for key in ours if not same(ours[key], whole[key])], name

    def leaves(folder: Path) -> list[np.ndarray]:
        return [array for i in range(16) for array in arrays(folder / f"{i}.npz").values()]

    ours, full = leaves(original / one_shard), leaves(shared / "golden/mp1/ckpt_full/step_5/shard_0")
    # parameters and step; then as many first and second moments, with a count
    assert len(full) == 3 * len(ours)
    assert all(map(same, ours, full[-len(ours) :]))


def test_both_initial_checkpoints_are_equal(original: Path, shared: Path) -> None:
    """The shipped initial checkpoint of eight shards, merged, equals that of one shard."""
    start = arrays(shared / "golden/init_logical.npz")
    names = golden.checkpoint_names(3, "layernorm", "rotary")
    assert set(names) == set(start)
    merged = golden.read_checkpoint(original / "mp8/ckpt_init/step_0", names)
    assert not [name for name in names if not same(merged[name], start[name])]


def test_the_texts_are_the_beginnings_of_the_full_texts(texts: Path, shared: Path) -> None:
    assert len(list(files(texts))) == 5
    for name in files(texts):
        ours, whole = (texts / name).read_bytes(), (shared / "data" / name).read_bytes()
        assert ours.endswith(b"\n") or ours == whole
        assert whole.startswith(ours)
        assert name.startswith("gpt2_tokenizer") == (ours == whole)


def test_the_last_lines_tell_what_was_skipped(repo: Path, tmp_path: Path) -> None:
    """In a checkout without the folder `shared` beside it."""
    tests = tmp_path / "checkout/tests"
    (tests / "golden").mkdir(parents=True)
    for name in ("conftest.py", "golden/__init__.py"):
        shutil.copy(repo / "tests" / name, tests / name)
    shutil.copytree(repo / "tests/support", tests / "support", ignore=shutil.ignore_patterns("test_*"))
    shutil.copy(repo / "pyproject.toml", tests.parent)
    source = "import pytest\ndef test_a(shared): assert 0\ndef test_b(shared): assert 0\n"
    (tests / "test_some.py").write_text(f"{source}def test_c(): pytest.skip('no browser')\ndef test_d(): pass\n")
    # importing the plugins takes seconds
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest"]
    done = subprocess.run(command, cwd=tests.parent, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
    *_, shared, browser, unselected, _, count = done.stdout.splitlines()
    assert shared == f"2 skipped: {NO_SHARED}"
    assert browser == "1 skipped: no browser"
    assert "-m 'pod or faults'" in unselected
    assert "1 passed, 3 skipped" in count
