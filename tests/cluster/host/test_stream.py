"""The stream of batches from the driver to a worker."""

import threading

import numpy as np
import pytest
from support.waiting import LONG_S

from mesh_transformer.cluster.host import stream
from mesh_transformer.cluster.host.stream import BUFFER_BATCHES, RESERVED_BATCHES, StreamedFeed, Streamer, may_take
from mesh_transformer.config import parse_config
from mesh_transformer.runtime.session import tokenizer
from mesh_transformer.runtime.training import feeds
from mesh_transformer.sequences import Sequences


def batch(number):
    return Sequences(np.full((1, 2, 3), number, np.int32))


def taking(feed):
    """Take one batch in another thread, which appends it to the returned list."""
    got: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: got.append(next(feed)), daemon=True)
    thread.start()
    return thread, got


@pytest.fixture
def events():
    return []


@pytest.fixture
def feed(events):
    return StreamedFeed(events.append, (1, 4), 8)


def test_it_sends_a_request_and_then_an_event_for_each_batch(feed, events):
    feed.set_state({"epoch": 3})
    for number in range(RESERVED_BATCHES + 2):
        feed.put(number, batch(number), {"at": number}, number - 1)
    feed.put(RESERVED_BATCHES + 2, batch(RESERVED_BATCHES + 2), {}, RESERVED_BATCHES + 1)
    assert next(feed).tokens[0, 0, 0] == 0
    assert feed.get_state() == {"at": 0}
    assert next(feed).tokens[0, 0, 0] == 1
    assert events == [
        {"kind": "feed", "rows": [1, 4], "microbatch": 8, "state": {"epoch": 3}},
        {"kind": "taken", "count": 1},
        {"kind": "taken", "count": 2},
    ]


def test_a_batch_waits_until_all_workers_hold_the_later_ones(feed):
    for number in range(RESERVED_BATCHES + 1):
        feed.put(number, batch(number), {}, number - 1)
    thread, got = taking(feed)
    thread.join(0.2)
    assert not got
    feed.put(RESERVED_BATCHES + 1, batch(RESERVED_BATCHES + 1), {}, RESERVED_BATCHES)
    thread.join(LONG_S)
    assert got[0].tokens[0, 0, 0] == 0


def test_reserved_batches_are_released_slowly(feed, monkeypatch):
    monkeypatch.setattr(stream, "RELEASE_S", 0.5)
    for number in range(RESERVED_BATCHES + 1):
        feed.put(number, batch(number), {}, number)
    assert next(feed).tokens[0, 0, 0] == 0
    thread, got = taking(feed)
    feed.drain()
    thread.join(0.2)
    assert not got
    thread.join(LONG_S)
    assert got[0].tokens[0, 0, 0] == 1


@pytest.mark.parametrize("sent", range(BUFFER_BATCHES + 1))
def test_the_agent_knows_whether_a_worker_waits_for_the_driver(feed, sent):
    """Agent and worker count batches alike. Such a wait is no hang."""
    for number in range(sent):
        feed.put(number, batch(number), {}, number - 1)
    thread, got = taking(feed)
    thread.join(0.2)
    assert bool(got) is may_take(sent, 0)


class Finite:
    """A loader of three batches."""

    def __init__(self, *_):
        self.count = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.count == 3:
            raise StopIteration
        self.count += 1
        return batch(self.count)

    def get_state(self):
        return {"count": self.count}

    def close(self): ...


def test_a_worker_takes_all_batches_of_data_that_ends(feed, monkeypatch):
    monkeypatch.setattr(feeds, "read_train_set", Finite)
    monkeypatch.setattr(tokenizer, "with_run_tokenizer", lambda config, _: (config, None))
    config = parse_config({"model": {"layers": 1, "d_model": 8, "n_heads": 1, "n_vocab": 257, "pe_rotary_dims": 8}})

    def send(number, sequences, rows, state, held_by_all):
        feed.put(number, sequences, state, held_by_all)
        return True

    streamer = Streamer(send, config, [{"microbatch": 2, "state": None, "rows": [0, 1]}])
    taken = []
    thread = threading.Thread(target=lambda: taken.extend(feed), daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert [one.tokens[0, 0, 0] for one in taken] == [1, 2, 3]
    # the position of a resumed run
    assert feed.get_state() == {"count": 3}
    streamer.stop()
    assert streamer.error is None
