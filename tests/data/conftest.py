"""What the data tests share: the golden files and a small tokenizer, or a skip that says what is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mesh_transformer.data.records import write_records

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of the records and batches of the original program."""
    folder = SHARED / "golden" / "tfrecords"
    if not folder.is_dir():
        pytest.skip(f"golden records not found in {folder}")
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the test data: GPT-2's tokenizer files and text."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip(f"test data not found in {folder}")
    return folder


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """An index of three files with 11, 3 and 8 records of 5 tokens; record k of all holds k, k, k, k, k."""
    first = 0
    for name, count in (("a", 11), ("b", 3), ("c", 8)):
        rows = [np.full(5, first + k) for k in range(count)]
        write_records(str(tmp_path / f"{name}.tfrecords"), rows)
        first += count
    index = tmp_path / "all.index"
    index.write_text("a.tfrecords\n\nb.tfrecords\nc.tfrecords\n")
    return index
