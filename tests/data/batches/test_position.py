"""Positions in the data: exact where the data is the same, refused where it is not."""

import json

import numpy as np
import pytest
from support.loading import MODES, take, train

from mesh_transformer.data.records.tfrecords import write_records
from mesh_transformer.errors import UserError


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_resume_at_every_step(dataset, mode, prefetch):
    straight = train(dataset, prefetch=prefetch, **mode)
    states, batches = [straight.get_state()], []
    for _ in range(16):
        batches += take(straight, 1)
        states.append(straight.get_state())
    for at, state in enumerate(states[:-2]):
        resumed = train(dataset, prefetch=prefetch, **mode)
        resumed.set_state(json.loads(json.dumps(state)))
        assert resumed.get_state() == state
        assert take(resumed, 16 - at) == batches[at:]


def test_states_of_another_data_set_are_refused(dataset):
    loader = train(dataset)
    take(loader, 3)
    state = loader.get_state()
    for change, message in (
        ({"name": "z.tfrecords"}, "does not fit"),
        ({"file": 7}, "does not fit"),
        ({"offset": 10**12}, "has only"),
        ({"record": -1}, "cannot be read"),
        ({"epoch": "x"}, "cannot be read"),
        ({"order": "?"}, "data.shuffle"),
        ({"files": {"7": "x"}}, "does not fit"),
        ({"files": {"-1": "x"}}, "cannot be read"),
        ({"files": {"0": 5}}, "cannot be read"),
        ({"files": ["x"]}, "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            train(dataset).set_state({**state, **change})
    with pytest.raises(UserError, match=r"data\.shuffle"):
        train(dataset, shuffle=True).set_state(state)
    for state in ({}, [], "x", 3):
        with pytest.raises(UserError, match="cannot be read"):
            train(dataset).set_state(state)


@pytest.mark.parametrize("size", ["shorter", "longer", "the same"])
@pytest.mark.parametrize("mode", MODES)
def test_a_replaced_record_file_is_reported(dataset, mode, size):
    """Whatever the new file holds at the old position: damage, or records of its own."""
    loader = train(dataset, prefetch=0, **mode)
    take(loader, 1)
    state = json.loads(json.dumps(loader.get_state()))
    read_from = dataset.with_name(state["name"])
    rows = [np.full(5, 100 + k) for k in range({"a": 11, "b": 3, "c": 8}[read_from.stem])]
    if size == "the same":
        write_records(str(read_from), rows)
    else:
        write_records(str(read_from), rows * 3 if size == "longer" else [])
    with pytest.raises(UserError, match=rf"{read_from.name} has changed since .*data\.restart=true"):
        train(dataset, **mode).set_state(state)


def test_every_file_of_a_shuffled_window_is_looked_at(dataset):
    mode = {"shuffle": True, "shuffle_window": 1000}
    loader = train(dataset, **mode)
    take(loader, 2)
    state = loader.get_state()
    for name in "abc":
        path = dataset.with_name(f"{name}.tfrecords")
        former = path.read_bytes()
        path.write_bytes(former + former)
        with pytest.raises(UserError, match=f"{name}.tfrecords has changed"):
            train(dataset, **mode).set_state(state)
        path.write_bytes(former)
    train(dataset, **mode).set_state(state)


def test_files_behind_the_position_may_change(dataset):
    """They are read from their beginning, as they are then; a longer index is a longer data set."""
    loader = train(dataset)
    take(loader, 1)
    write_records(str(dataset.with_name("b.tfrecords")), [np.full(5, 50 + k) for k in range(8)])
    write_records(str(dataset.with_name("d.tfrecords")), [np.full(5, 60 + k) for k in range(4)])
    dataset.write_text(dataset.read_text() + "d.tfrecords\n")
    longer = train(dataset)
    longer.set_state(loader.get_state())
    assert [batch[0][0] for batch in take(longer, 6)] == [4, 50, 54, 14, 18, 60]
