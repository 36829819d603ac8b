"""One client with many sequences does not keep others out."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from support.served import Served, refusal, serve
from support.waiting import until

SLOTS, QUEUE = 4, 16
MANY = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "n": SLOTS + QUEUE}
ONE = {"prompt": "b", "max_tokens": 1}


@contextmanager
def filled(server: Served, **options: object) -> Iterator[None]:
    """All places are taken by one client, until the end of the context."""
    thread = threading.Thread(target=lambda: server.post(MANY, **options))
    thread.start()
    until(lambda: server.loop.busy and len(server.loop._live) == SLOTS + QUEUE)
    try:
        yield
    finally:
        thread.join()


def from_address(server: Served, address: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, transport=httpx.HTTPTransport(local_address=address, verify=False))


def test_another_address_has_its_place_and_its_turn() -> None:
    with serve(slots=SLOTS, max_queue=QUEUE, delay=0.01, context=64) as server, filled(server):
        # the first client has its own queue, and no more
        assert refusal(server.post(ONE), 503)["code"] == "queue_full"
        with from_address(server, "127.0.0.2") as other:
            answer = other.post("/v1/completions", json=ONE)
        assert answer.status_code == 200
        # its first token came before the tenth sequence of the first client had a slot
        inserted = [call for call in server.engine.calls if call[0] == "insert"]
        assert len(inserted) <= 9


def test_places_beyond_the_queue_are_as_many_as_slots() -> None:
    with serve(slots=SLOTS, max_queue=QUEUE, delay=0.02, context=64) as server, filled(server):
        statuses = []
        threads = []
        for number in range(SLOTS + 2):

            def ask(address: str = f"127.0.0.{number + 3}") -> None:
                with from_address(server, address) as other:
                    statuses.append(other.post("/v1/completions", json={**ONE, "max_tokens": 30}).status_code)

            threads.append(threading.Thread(target=ask))
            threads[-1].start()
            until(lambda number=number: len(server.loop._live) + statuses.count(503) >= SLOTS + QUEUE + number + 1)
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200] * SLOTS + [503] * 2


@pytest.mark.parametrize("same", [True, False])
def test_keys_are_clients(same: bool) -> None:
    with serve(slots=SLOTS, max_queue=QUEUE, delay=0.01, context=64, keys=["first", "second"]) as server:
        first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
        with filled(server, headers=first):
            # of one address, and however the header is written
            headers = {"Authorization": "bearer first"} if same else second
            assert server.post(ONE, headers=headers).status_code == (503 if same else 200)


def test_retry_after_is_measured() -> None:
    with serve(slots=1, max_queue=0, delay=0.05, context=64) as server:
        for _ in range(3):
            server.complete("a", max_tokens=40, ignore_eos=True)
        # two seconds a sequence
        thread = threading.Thread(target=lambda: server.complete("a", max_tokens=40, ignore_eos=True))
        thread.start()
        until(lambda: server.loop.busy)
        response = server.post(ONE)
        assert refusal(response, 503)["code"] == "queue_full"
        assert 2 <= int(response.headers["Retry-After"]) <= 60
        thread.join()
