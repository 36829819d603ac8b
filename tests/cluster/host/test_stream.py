"""The driver's batches on their way to a worker."""

import threading

import numpy as np
import pytest

from mesh_transformer.cluster.host import stream
from mesh_transformer.cluster.host.stream import BUFFER_BATCHES, RESERVED_BATCHES, StreamedFeed, may_take


def batch(number):
    return np.full((1, 2, 3), number, np.int32)


def taking(feed):
    """Take one batch in a thread of its own; what comes is appended to the list."""
    got: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: got.append(next(feed)), daemon=True)
    thread.start()
    return thread, got


@pytest.fixture
def told():
    return []


@pytest.fixture
def feed(told):
    return StreamedFeed(told.append, (1, 4), 8)


def test_it_asks_first_and_then_tells_of_each_batch(feed, told):
    feed.set_state({"epoch": 3})
    for number in range(RESERVED_BATCHES + 2):
        feed.put(number, batch(number), {"at": number}, number - 1)
    feed.put(RESERVED_BATCHES + 2, batch(RESERVED_BATCHES + 2), {}, RESERVED_BATCHES + 1)
    assert next(feed)[0, 0, 0] == 0
    assert feed.get_state() == {"at": 0}
    assert next(feed)[0, 0, 0] == 1
    assert told == [
        {"kind": "feed", "rows": [1, 4], "microbatch": 8, "state": {"epoch": 3}},
        {"kind": "taken", "count": 1},
        {"kind": "taken", "count": 2},
    ]


def test_a_batch_waits_until_all_hold_those_behind_it(feed):
    for number in range(RESERVED_BATCHES + 1):
        feed.put(number, batch(number), {}, number - 1)
    thread, got = taking(feed)
    thread.join(0.2)
    assert not got
    feed.put(RESERVED_BATCHES + 1, batch(RESERVED_BATCHES + 1), {}, RESERVED_BATCHES)
    thread.join(5)
    assert got[0][0, 0, 0] == 0


def test_the_last_batches_are_given_out_slowly(feed, monkeypatch):
    monkeypatch.setattr(stream, "RELEASE_S", 0.5)
    for number in range(RESERVED_BATCHES + 1):
        feed.put(number, batch(number), {}, number)
    assert next(feed)[0, 0, 0] == 0
    thread, got = taking(feed)
    feed.drain()
    thread.join(0.2)
    assert not got
    thread.join(5)
    assert got[0][0, 0, 0] == 1


@pytest.mark.parametrize("given", range(BUFFER_BATCHES + 1))
def test_the_agent_knows_whether_a_worker_waits_for_the_driver(feed, given):
    """Only then it does not hang: both ends count alike."""
    for number in range(given):
        feed.put(number, batch(number), {}, number - 1)
    thread, got = taking(feed)
    thread.join(0.2)
    assert bool(got) is may_take(given, 0)
