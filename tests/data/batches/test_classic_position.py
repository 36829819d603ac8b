"""The original's data positions, against the batches that the original gave."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh_transformer.data.batches.classic_position import classic_position
from mesh_transformer.data.batches.loader import make_train_loader
from mesh_transformer.errors import UserError


@pytest.mark.parametrize(("case", "accumulation", "batch"), [("train_2x2", 2, 2), ("train_3x1", 3, 1)])
def test_the_batches_that_would_have_followed(original: Path, case: str, accumulation: int, batch: int) -> None:
    folder = original / "tfrecords"
    index = str(folder / "tiny.train.index")
    states = json.loads((folder / "loader_golden.json").read_text())[f"{case}/states"]
    batches = np.load(folder / "loader_golden.npz")[f"{case}/batches"]
    for at, state in enumerate(states[:-1]):
        loader = make_train_loader(index, seq=64, accumulation=accumulation, batch=batch, rows=range(batch))
        loader.set_state(classic_position(index, state, accumulation * batch))
        np.testing.assert_array_equal(next(loader).tokens, batches[at + 1], err_msg=str(at))
        loader.close()


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"used": ["other.tfrecords"], "file_idx": 0}, "had read .'other.tfrecords'. of its training set"),
        ({"used": ["tiny_40.tfrecords", "tinyb_7.tfrecords"], "file_idx": 0}, "restore the former index"),
        ({"used": [], "file_idx": 10}, "had taken 11 batches of 4 sequences .* holds only 40"),
        ({"used": [], "file_idx": -1}, "expected used"),
        ({"used": [], "file_idx": True}, "expected used"),
        ({"used": "tiny_40.tfrecords", "file_idx": 0}, "expected used"),
        ({"used": [3], "file_idx": 0}, "expected used"),
        ({}, "expected used"),
        ([1], "expected used"),
    ],
)
def test_a_position_that_does_not_fit(original: Path, stored: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as wrong:
        classic_position(str(original / "tfrecords/tiny.train.index"), stored, 4)
    assert "data.restart=true" in str(wrong.value)
