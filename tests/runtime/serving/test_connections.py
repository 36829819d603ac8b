"""Clients that send nothing, send slowly or do not read: they use bounded resources, and other clients are served."""

import contextlib
import select
import socket
import threading
import time

import httpx
import psutil
import pytest
from support.commands import finish
from support.processes import process, wait_for_health
from support.served import KEY, expected, refusal, serve, text_of
from support.waiting import LONG_S, until
from support.wire import ask, body_of, connect, read_to_end, receive, send_slowly

from mesh_transformer.data.tokens.tokenizer import ByteTokenizer
from mesh_transformer.runtime.serving import access

SOON = 0.3


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(access, "HEAD_S", SOON)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_answer_does_not_wait_for_the_acknowledgement_of_the_one_before(host):
    """Nagle's algorithm holds the body back until the client acknowledges the head, for 40 ms on a kept connection."""
    with serve(host=host) as server:
        assert server.client.get("/health").status_code == 200
        (connection,) = server.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.family == (socket.AF_INET6 if ":" in host else socket.AF_INET)
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("sent", [b"", b"P", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_socket_on_which_no_request_comes_is_closed(hasty, sent):
    with serve() as server, connect(server.url) as client:
        began = time.monotonic()
        client.sendall(sent)
        assert read_to_end(client) == b""
        assert time.monotonic() - began > SOON / 2


def test_a_head_byte_by_byte_has_no_more_time(hasty):
    with serve() as server, connect(server.url) as client:
        assert not send_slowly(client, ask() * 20, 0.02)


def test_a_byte_after_an_answer_is_no_way_to_keep_a_socket(hasty):
    with serve() as server, connect(server.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        receive(client, b'{"status":"ok",')
        client.sendall(b"G")
        assert read_to_end(client) == b""


def test_a_second_request_on_a_socket_has_its_own_time(hasty):
    with serve() as server, connect(server.url) as client:
        for _ in range(4):
            client.sendall(b"GET /health HTTP/1.1\r\n")
            time.sleep(SOON / 2)
            client.sendall(b"Host: localhost\r\n\r\n")
            receive(client, b'{"status":"ok",')


@pytest.mark.parametrize("keys", [[KEY], []])
def test_a_refused_body_that_goes_on_is_cut_off(hasty, keys):
    size = 10 * access.MAX_BODY_BYTES
    with serve(keys=keys) as server, connect(server.url) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode())
        assert (b" 401 " if keys else b" 413 ") in client.recv(100)  # before any byte of the body
        assert not send_slowly(client, b" " * 6000, 0.01)


def test_a_body_byte_by_byte_is_refused(monkeypatch):
    monkeypatch.setattr(access, "MAX_BODY_S", SOON)
    with serve() as server, connect(server.url) as client:
        request = ask()
        client.sendall(request[:-30])
        send_slowly(client, request[-30:-10], 0.03)
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_a_stream_that_is_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(access, "STALL_S", SOON)
    with serve(slots=1, delay=0.005, context=4096, send_buffer=4096) as server:
        with connect(server.url, receive_buffer=4096) as client:
            client.sendall(ask(stream=True, logprobs=20, max_tokens=4000))
            until(lambda: server.metric("requests_running") == 1)
            until(lambda: not server.engine.in_use)
            assert server.metric("generated_tokens_total") < 1000
            assert b"[DONE]" not in read_to_end(client)
        seeded = server.complete("b", seed=1)["choices"][0]["text"]
        assert seeded == text_of(expected(b"b", seed=1))
        assert server.open_connections <= 1


def test_an_answer_that_is_not_read_holds_its_socket_no_longer(monkeypatch):
    monkeypatch.setattr(access, "SLOWEST_BYTES_A_SECOND", 1 << 20)
    monkeypatch.setattr(access, "STALL_S", SOON)
    with serve(context=256, send_buffer=4096) as server, connect(server.url, receive_buffer=4096) as client:
        server.client.close()
        client.sendall(ask(logprobs=20, max_tokens=200, head_lines="Connection: close\r\n"))
        until(lambda: server.engine.calls)
        until(lambda: server.open_connections == 0)


def test_a_slow_reader_gets_all(monkeypatch):
    monkeypatch.setattr(access, "STALL_S", 1)
    began = time.monotonic()
    with serve(context=512, send_buffer=4096) as server, connect(server.url, receive_buffer=4096) as client:
        client.sendall(ask(stream=True, logprobs=5, max_tokens=450))
        received = b""
        while b"[DONE]" not in received:
            time.sleep(0.1)
            part = client.recv(4096)
            assert part
            received += part
    assert time.monotonic() - began > 2


def test_more_sockets_than_are_taken(caplog):
    with serve() as server:
        server.allow_connections(3)
        server.client.close()
        until(lambda: server.open_connections == 0)
        kept = [connect(server.url) for _ in range(3)]
        for client in kept:
            client.sendall(ask()[:1])
        until(lambda: [connection.silent for connection in server.connections] == [False] * 3)
        with connect(server.url) as refused:
            refused.sendall(ask())
            answer = read_to_end(refused)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in answer
        assert body_of(answer)["error"]["code"] == "too_many_connections"
        until(lambda: server.open_connections == 3)
        kept[0].sendall(ask()[1:])
        receive(kept[0], b'"total_tokens":61}}')  # now it is idle, so a new connection replaces it
        with connect(server.url) as taken:
            taken.sendall(ask())
            receive(taken, b"200 OK")
        # the oldest that has sent nothing gives way, not the one whose request is answered
        for client in kept:
            client.close()
        until(lambda: server.open_connections == 0)
        with connect(server.url) as answered, connect(server.url) as silent, connect(server.url) as other:
            answered.sendall(ask())
            receive(answered, b'"total_tokens":61}}')
            until(lambda: server.open_connections == 3)
            with connect(server.url) as taken:
                assert read_to_end(silent) == b""
                for client in (answered, other, taken):
                    client.sendall(ask())
                    receive(client, b'"total_tokens":61}}')
    # one line each, whatever their number
    assert sorted(message.split(":")[0] for message in caplog.messages if message.startswith("sockets ")) == [
        "sockets closed that had sent nothing, for others",
        "sockets refused",
    ]


def test_a_burst_of_silent_sockets(tmp_path):
    """With 128 files, as with 1,500 sockets and 1,024 files: the process goes on, and a kept connection is answered."""
    request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with process(tmp_path, FAKE_WARM_UP="1") as (child, url), connect(url) as kept:
        psutil.Process(child.pid).rlimit(psutil.RLIMIT_NOFILE, (128, 128))
        kept.sendall(request)
        receive(kept, b'"object":"list"')
        for _ in range(5):
            with contextlib.ExitStack() as stack:
                burst = [stack.enter_context(socket.socket()) for _ in range(300)]
                for silent in burst:
                    silent.setblocking(False)
                    silent.connect_ex(kept.getpeername())
                for _ in range(5):
                    kept.sendall(request)
                    receive(kept, b'"object":"list"')
                # the server closes one when it has accepted as many as it has files for: on a busy machine this is late
                assert select.select(burst, [], [], LONG_S)[0]
        wait_for_health(url)
        child.terminate()
        _, log = finish(child)
    assert "Too many open files" not in log
    assert "sockets closed that had sent nothing, for others: " in log
    assert len(log.splitlines()) < 20


@pytest.mark.parametrize("parts", [1, 2])
def test_http_2_gets_one_answer(parts):
    """The preface of a client with prior knowledge looks like a request and its body (RFC 9113, 3.4)."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)
    with serve() as server, connect(server.url) as client:
        for part in (preface[: len(preface) // parts], preface[len(preface) // parts :]):
            with contextlib.suppress(OSError):
                client.sendall(part)
        answer = read_to_end(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_all_bodies_together_are_bounded(monkeypatch):
    monkeypatch.setattr(access, "MAX_BODIES_BYTES", 100_000)
    with serve() as server, connect(server.url) as first:
        request = ask(ignored="x" * 60_000)
        first.sendall(request[:-1])
        large = {"prompt": "a", "ignored": "x" * 60_000}
        until(lambda: server.post(large).status_code == 503)
        assert "large" in refusal(server.post(large), 503)["message"]
        first.sendall(request[-1:])
        receive(first, b'"total_tokens":61}}')
        assert server.post(large).status_code == 200


def test_the_bodies_of_one_client_leave_room_for_others(monkeypatch):
    monkeypatch.setattr(access, "MAX_CLIENT_BODIES_BYTES", 100_000)
    with serve() as server, connect(server.url) as first:
        request = ask(ignored="x" * 60_000)
        first.sendall(request[:-1])
        large = {"prompt": "a", "ignored": "x" * 60_000}
        until(lambda: server.post(large).status_code == 503)
        assert server.complete("a")["choices"]  # a short one
        with httpx.Client(
            base_url=server.url, transport=httpx.HTTPTransport(local_address="127.0.0.2", verify=False)
        ) as other:
            assert other.post("/v1/completions", json=large).status_code == 200
        first.sendall(request[-1:])
        receive(first, b'"total_tokens":61}}')
        assert server.post(large).status_code == 200


def test_clients_behind_a_proxy_of_this_machine_are_distinguished(monkeypatch):
    monkeypatch.setattr(access, "MAX_CLIENT_BODIES_BYTES", 100_000)
    with serve() as server, connect(server.url) as first:
        request = ask(ignored="x" * 60_000, head_lines="X-Forwarded-For: 192.0.2.1\r\n")
        first.sendall(request[:-1])
        large = {"prompt": "a", "ignored": "x" * 60_000}
        asked = {"X-Forwarded-For": "192.0.2.1"}
        until(lambda: server.post(large, headers=asked).status_code == 503)
        assert server.post(large, headers={"X-Forwarded-For": "192.0.2.2"}).status_code == 200


class SlowTokenizer(ByteTokenizer):
    """Waits for `may` before it encodes a text with a q."""

    may = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if "q" in text:
            self.may.wait(LONG_S)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def slow_tokenizer():
    SlowTokenizer.may.clear()
    yield SlowTokenizer()
    SlowTokenizer.may.set()


def test_prompts_that_are_being_encoded_are_in_the_queue(slow_tokenizer):
    with serve(tokenizer=slow_tokenizer, slots=1, max_queue=1) as server:
        with connect(server.url) as client:
            client.sendall(ask(prompt=["q", "q"]))
            until(lambda: server.metric("requests_waiting") == 2)
            assert refusal(server.post({"prompt": [1]}), 503)["code"] == "queue_full"
        until(lambda: server.metric("requests_waiting") == 0)  # the client has left
        assert server.complete([97], seed=1)["choices"][0]["text"] == text_of(expected(b"a", seed=1))
        slow_tokenizer.may.set()
        assert server.complete("q")["choices"]
        assert server.metric("prompt_tokens_total") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_for_a_request_counts_its_encoding(slow_tokenizer, stream):
    with serve(tokenizer=slow_tokenizer, timeout_s=0.3) as server:
        error = refusal(server.post({"prompt": "q", "stream": stream}), 504)
        assert error["code"] == "timeout"
        assert server.metric("requests_waiting") == 0
        slow_tokenizer.may.set()


def test_what_is_being_encoded_when_the_drain_ends_is_not_started(slow_tokenizer):
    with serve(tokenizer=slow_tokenizer, drain_s=0.2) as server, connect(server.url) as client:
        client.sendall(ask(prompt="q", head_lines="Connection: close\r\n"))
        until(lambda: server.metric("requests_waiting") == 1)
        server.terminate()
        time.sleep(0.5)
        slow_tokenizer.may.set()
        assert body_of(read_to_end(client))["error"]["code"] == "draining"
        server.thread.join(LONG_S)
        assert not server.engine.calls
