"""What the data tests share: the golden files and a small tokenizer, or a skip that says what is missing."""

from pathlib import Path

import numpy as np
import pytest

from mesh_transformer.data.records.tfrecords import write_records


@pytest.fixture(scope="session")
def golden(original: Path) -> Path:
    """The folder of the records and batches of the original program."""
    return original / "tfrecords"


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
