"""From warm-up to the end: overload, clients that disconnect, time limits, draining, an engine that fails."""

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support import loopback
from support.served import expected, refusal, serve, text_of
from support.waiting import LONG_S, until
from support.wire import ask, connect


def test_the_port_is_open_while_the_engine_warms_up():
    with serve(held=True) as server:
        until(lambda: server.thread.is_alive())
        health = server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "warming up")
        assert server.client.get("/live").status_code == 200
        response = server.post({"prompt": "a"})
        assert refusal(response, 503)["code"] == "warming_up"
        assert int(response.headers["retry-after"]) >= 1
        assert server.client.get("/metrics").status_code == 200
        assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] is None
        server.engine.may_warm_up.set()
        until(lambda: server.client.get("/health").status_code == 200)
        assert server.client.get("/health").json() == {"status": "ok", "programs": 3, "compiling": 18}
        assert server.complete("a")["choices"]


def test_a_request_waits_for_its_program_and_others_go_on():
    """Without load: the engine's thread sleeps until the program is there."""
    with serve(slots=2, max_prefill_tokens=8) as server, ThreadPoolExecutor(2) as pool:
        server.engine.compiled.clear()
        waiting = pool.submit(server.complete, "abcdefg", max_tokens=2, seed=0)
        until(lambda: server.metric("requests_running") == 1)
        assert server.complete("abc", max_tokens=20, ignore_eos=True)["choices"][0]["finish_reason"] == "length"
        assert not waiting.done()
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.3
        server.engine.compiled.set()
        server.engine.on_compiled()
        assert waiting.result(LONG_S)["choices"][0]["text"] == text_of(expected(b"abcdefg", seed=0, max_tokens=2))


def test_more_than_the_queue_holds_is_refused_at_once():
    with serve(slots=2, max_queue=3, delay=0.1) as server, ThreadPoolExecutor(8) as pool:
        fields = {"prompt": "a", "max_tokens": 50, "ignore_eos": True, "seed": 0}
        running = [pool.submit(server.complete, **fields) for _ in range(5)]
        until(lambda: server.metric("requests_running") == 2 and server.metric("requests_waiting") == 3)
        server.engine.may_generate.clear()
        response = server.post(fields)
        assert refusal(response, 503)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        pair = server.post({**fields, "n": 2})
        assert pair.status_code == 503
        server.engine.go_on()
        texts = {future.result()["choices"][0]["text"] for future in running}
        assert texts == {text_of(expected(b"a", seed=0, max_tokens=50, stop_token_ids=()))}
        assert server.complete("a", n=5, max_tokens=2)["choices"][4]
        refusal(server.post({**fields, "n": 6}), 400)
        assert server.metric("queue_seconds_count") == 10


def test_all_sequences_of_a_request_are_queued_or_none():
    with serve(slots=1, max_queue=1, delay=0.1) as server, connect(server.url) as client:
        client.sendall(ask())
        until(lambda: server.metric("requests_running") == 1)
        server.engine.may_generate.clear()
        refusal(server.post({"prompt": "b", "n": 2}), 503)
        assert server.metric("requests_waiting") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots_within_a_step(stream):
    with serve(slots=2, delay=0.2) as server:
        client = connect(server.url)
        client.sendall(ask(stream=stream, n=4))  # two run, two wait
        if stream:
            received = b""
            while b"text_completion" not in received:
                received += client.recv(65536)
        until(lambda: server.metric("requests_running") == 2)
        calls = len(server.engine.calls)
        client.close()
        until(lambda: not server.engine.in_use)
        steps = [call for call in server.engine.calls[calls:] if call[0] in ("generate", "prefill")]
        assert len(steps) <= 3  # the rest of one step and, at worst, the next: each is a prefill and a generate
        assert server.metric("requests_running") == server.metric("requests_waiting") == 0
        assert server.complete("b", seed=1)["choices"][0]["text"] == text_of(expected(b"b", seed=1))


def test_a_client_that_leaves_frees_its_slot_in_mid_prompt():
    with serve(slots=1, context=1024, delay=0.2) as server:
        client = connect(server.url)
        client.sendall(ask(prompt="a" * 900))  # 113 chunks
        until(lambda: len(server.engine.calls) > 3)
        calls = len(server.engine.calls)
        client.close()
        until(lambda: not server.engine.in_use)
        prefills = [call for call in server.engine.calls[calls:] if call[0] == "prefill"]
        assert len(prefills) <= 2  # the rest of one step and, at worst, the next
        assert server.complete("b", seed=1)["choices"][0]["text"] == text_of(expected(b"b", seed=1))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_is_never_computed(stream):
    with serve(slots=1, delay=0.1) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.complete, "a", max_tokens=60, ignore_eos=True)
        until(lambda: server.metric("requests_running") == 1)
        client = connect(server.url)
        client.sendall(ask(prompt=["b", "c"], n=3, stream=stream))
        until(lambda: server.metric("requests_waiting") == 6)
        client.close()
        until(lambda: server.metric("requests_waiting") == 0)
        server.engine.go_on()
        first.result()
        assert server.complete("d")["choices"]
        assert [call[0] for call in server.engine.calls].count("insert") == 2


def test_a_client_that_leaves_before_its_body_is_whole():
    with serve() as server:
        for cut in (30, 120):
            with connect(server.url) as client:
                client.sendall(ask()[:cut])
        assert server.complete("a")["choices"]
        assert server.metric("prompt_tokens_total") == 1


def test_a_request_that_takes_too_long_is_ended():
    with serve(slots=1, delay=0.02, timeout_s=0.4) as server:
        began = time.monotonic()
        error = refusal(server.post({"prompt": "a", "max_tokens": 60, "ignore_eos": True}), 504)
        assert time.monotonic() - began >= 0.4
        assert "0.4 seconds" in error["message"]


def test_a_stream_that_takes_too_long_ends_with_an_error():
    with serve(slots=1, delay=0.1, timeout_s=2) as server:
        with server.client.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True},
        ) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        assert len(lines) > 2
        until(lambda: not server.engine.in_use)


def test_a_body_that_takes_too_long_is_refused():
    with serve(timeout_s=0.3) as server, connect(server.url) as client:
        client.sendall(ask()[:120])
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_a_client_that_does_not_read_holds_no_slot_for_long():
    with serve(slots=1, delay=0.001) as server, connect(server.url) as client:
        client.sendall(ask(stream=True, logprobs=20, n=16))
        assert server.complete("b", seed=1)["choices"][0]["text"] == text_of(expected(b"b", seed=1))


def test_draining_finishes_what_runs_and_takes_no_more():
    with serve(slots=1, delay=0.1) as server, ThreadPoolExecutor(4) as pool:
        fields = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "seed": 2}
        whole = [pool.submit(server.complete, **fields) for _ in range(2)]  # one runs, one waits
        until(lambda: server.metric("requests_waiting") == 1)
        with loopback.stream("POST", f"{server.url}/v1/completions", json={**fields, "stream": True}) as stream:
            lines = stream.iter_lines()
            until(lambda: server.metric("requests_waiting") == 2)
            server.engine.may_generate.clear()
            server.terminate()
            until(lambda: server.client.get("/health").status_code == 503)
            assert server.client.get("/health").json()["status"] == "draining"
            assert server.client.get("/live").status_code == 200
            response = server.post(fields)
            assert refusal(response, 503)["code"] == "draining"
            server.engine.go_on()
            events = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
        wanted = text_of(expected(b"a", seed=2, max_tokens=40, stop_token_ids=()))
        assert "".join(event["choices"][0]["text"] for event in events) == wanted
        assert [future.result()["choices"][0]["text"] for future in whole] == [wanted] * 2
        server.thread.join(LONG_S)
        assert not server.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            loopback.get(f"{server.url}/health")


def test_what_is_not_finished_in_time_is_told_so():
    with serve(slots=1, delay=0.1, drain_s=0.3) as server, ThreadPoolExecutor(4) as pool:
        fields = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}
        waiting = [pool.submit(server.post, fields) for _ in range(2)]
        until(lambda: server.metric("requests_waiting") == 1)
        server.terminate()
        for future in waiting:
            assert refusal(future.result(), 503)["code"] == "draining"
        server.thread.join(LONG_S)
        assert not server.thread.is_alive()


def test_an_engine_that_fails_ends_the_server_after_its_answers(caplog):
    caplog.set_level(logging.CRITICAL, "uvicorn.error")
    with serve(slots=1, delay=0.1) as server, ThreadPoolExecutor(4) as pool:
        fields = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}
        waiting = [pool.submit(server.post, fields) for _ in range(2)]
        until(lambda: server.metric("requests_waiting") == 1)
        server.engine.broken = True
        for future in waiting:
            assert "the model failed" in refusal(future.result(), 500)["message"]
        server.thread.join(LONG_S)
        assert not server.thread.is_alive()
        assert server.loop.state == "failed"
        assert "a device was lost" in str(server.loop.failure)


def test_a_stream_reports_that_the_engine_failed(caplog):
    caplog.set_level(logging.CRITICAL, "uvicorn.error")
    with serve(slots=1, delay=0.1) as server:
        body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with loopback.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert '"choices"' in next(lines)
            server.engine.broken = True
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert (error["type"], error["message"]) == ("server_error", "the model failed and the server stops")


def test_the_engines_thread_ends_with_the_server():
    with serve() as server:
        server.complete("a")
        (thread,) = [t for t in threading.enumerate() if t.name == "engine" and t.is_alive()]
    until(lambda: not thread.is_alive())
