"""The server as a process: its arguments, its signals, its exit codes."""

import contextlib
import math
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support import loopback
from support.commands import finish, run, write_run
from support.processes import PATHS, PROGRAM, process, wait_for_health
from support.waiting import until
from support.wire import ask, connect, receive

from mesh_transformer.config import Config, load_config
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.serving import start as serving


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_open_streams_and_exits_with_0(tmp_path, number):
    with process(tmp_path, FAKE_DELAY="0.1") as (child, url):
        wait_for_health(url)
        body = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "seed": 1}
        whole = loopback.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(loopback.post(f"{url}/v1/completions", json=body)))
        waiting.start()
        with loopback.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            child.send_signal(number)
            wait_for_health(url, 503)
            # cluster managers repeat SIGTERM
            child.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        events = [httpx.Response(200, text=line[6:]).json() for line in [first, *rest[:-1]]]
        assert "".join(event["choices"][0]["text"] for event in events) == whole
        waiting.join()
        assert answers[0].json()["choices"][0]["text"] == whole
        _, errors = finish(child, 0)
        assert "Traceback" not in errors
        assert " I stopping: running requests have 30 seconds to finish" in errors


def test_a_sighup_that_is_ignored_at_the_start_stays_so(tmp_path):
    """As with nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with process(tmp_path, fresh=True) as (child, url):
        wait_for_health(url)
        child.send_signal(signal.SIGHUP)
        for _ in range(3):
            assert loopback.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
        child.terminate()
        _, errors = finish(child, 0)
    assert errors.count(" I stopping") == 1


def test_what_outlasts_the_drain_is_cut_off_and_the_exit_code_is_0(tmp_path):
    with process(tmp_path, "--drain-seconds", "0.2", FAKE_DELAY="0.3") as (child, url):
        wait_for_health(url)
        body = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "stream": True}
        with loopback.stream("POST", f"{url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert '"code":"draining"' in rest[-2]
        _, errors = finish(child, 0)
        assert "cancelled 1 unfinished sequence\n" in errors


def test_sigterm_waits_for_long_prompts_and_the_queue(tmp_path):
    options = ["--slots", "1", "--set", "model.seq=512"]
    with process(tmp_path, *options, FAKE_DELAY="0.01") as (child, url), ThreadPoolExecutor(3) as pool:
        wait_for_health(url)
        body = {"prompt": "a" * 400, "max_tokens": 9, "ignore_eos": True}  # 50 chunks
        answers = [pool.submit(loopback.post, f"{url}/v1/completions", json=body) for _ in range(3)]
        there = ("requests_running 1.0", "requests_waiting 2.0")  # all three; one has started
        until(lambda: all(line in loopback.get(f"{url}/metrics").text for line in there), child)
        child.send_signal(signal.SIGTERM)
        for answer in answers:
            assert answer.result().json()["usage"]["completion_tokens"] == 9
        finish(child, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_holds_up_the_end_no_longer_than_the_drain(tmp_path, stream):
    options = ["--drain-seconds", "1", "--set", "model.seq=512"]
    with process(tmp_path, *options, FAKE_SEND_BUFFER="4096") as (child, url):
        wait_for_health(url)
        with connect(url, receive_buffer=4096) as client:
            client.sendall(ask(stream=stream, max_tokens=100, logprobs=20))
            until(lambda: "generated_tokens_total 100.0" in loopback.get(f"{url}/metrics").text, child)
            child.send_signal(signal.SIGTERM)
            _, errors = finish(child, 0)
        assert "closed 1 connections" in errors
        assert "Traceback" not in errors


def test_a_slow_reader_has_the_drain_to_take_its_stream(tmp_path):
    with process(tmp_path, "--set", "model.seq=512", FAKE_SEND_BUFFER="4096") as (child, url):
        wait_for_health(url)
        with connect(url, receive_buffer=4096) as client:
            client.sendall(ask(stream=True, max_tokens=100, logprobs=20))
            until(lambda: "generated_tokens_total 100.0" in loopback.get(f"{url}/metrics").text, child)
            child.send_signal(signal.SIGTERM)
            # longer than the server waits for a client after the time for draining
            time.sleep(6)
            receive(client, b"[DONE]")
        finish(child, 0)


def test_a_signal_while_the_process_ends_does_not_change_its_code(tmp_path):
    with process(tmp_path, FAKE_END="1") as (child, url):
        wait_for_health(url)
        child.send_signal(signal.SIGTERM)
        while "ending" not in child.stderr.readline():
            pass
        child.send_signal(signal.SIGTERM)
        finish(child, 0)


def test_an_engine_that_fails_ends_the_process_with_1(tmp_path):
    with process(tmp_path, FAKE_FAULT="late crash", FAKE_DELAY="0.02") as (child, url):
        wait_for_health(url)
        body = {"prompt": "a", "max_tokens": 31, "ignore_eos": True, "n": 2, "stream": True}
        waiting = {"prompt": ["b"] * 20, "max_tokens": 31, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(loopback.post, f"{url}/v1/completions", json=waiting)
            lines = loopback.post(f"{url}/v1/completions", json=body).text.split("\n\n")
            assert '"error":{"message":"the model failed' in lines[-3]
            assert lines[-2] == "data: [DONE]"
            assert other.result().status_code == 500
        _, errors = finish(child, 1)
        assert "RuntimeError: a device was lost" in errors


def test_several_processes_are_refused(tmp_path):
    write_run(tmp_path)
    others = {"JAX_COORDINATOR_ADDRESS": "localhost:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    _, errors = run("device_serve.py", "--config", "config.json", cwd=tmp_path, code=2, **others)
    assert "\nerror: this runs in one process" in errors
    assert "makes it one of 2, with the first at localhost:1234: unset JAX_COORDINATOR_ADDRESS, " in errors


def test_devices_of_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 4)
    monkeypatch.setattr(serving.platforms, "CompileCache", contextlib.nullcontext)
    with pytest.raises(UserError, match="belong to 4 processes"):
        serving._open_own_engine(load_config(str(write_run(tmp_path)), []), "run", slots=1)


def test_a_second_ctrl_c_cuts_the_drain_short(tmp_path):
    with process(tmp_path, "--drain-seconds", "60", FAKE_DELAY="0.2") as (child, url):
        wait_for_health(url)
        body = {"prompt": "a", "max_tokens": 31, "ignore_eos": True, "stream": True}
        with loopback.stream("POST", f"{url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            child.send_signal(signal.SIGINT)
            wait_for_health(url, 503)
            child.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert '"code":"draining"' in rest[-2]
        finish(child, 0)


def test_a_signal_during_the_warm_up_ends_the_process(tmp_path):
    with process(tmp_path, FAKE_WARM_UP="60") as (child, url):
        assert loopback.get(f"{url}/health").json()["status"] == "warming up"
        child.send_signal(signal.SIGTERM)
        finish(child, 0)


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [("user error", 2, "error: no checkpoint in run"), ("crash", 1, "RuntimeError: a device was lost")],
)
def test_an_engine_that_cannot_be_opened_ends_the_process(tmp_path, fault, code, words):
    with process(tmp_path, FAKE_FAULT=fault) as (child, _):
        _, errors = finish(child, code)
        assert words in errors
        assert ("Traceback" in errors) == (code == 1)


def test_allowed_origins_reach_the_server(tmp_path):
    origins = ["https://6b.eleuther.ai", "null"]
    with process(tmp_path, *(f"--allow-origin={origin}" for origin in origins)) as (_, url):
        for origin in [*origins, "https://evil.example"]:
            headers = loopback.get(f"{url}/health", headers={"Origin": origin}).headers
            assert headers.get("access-control-allow-origin") == (origin if origin in origins else None)


def test_a_bad_argument_is_one_line_and_exit_code_2(tmp_path):
    write_run(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        _, errors = run(PROGRAM, "--config", "config.json", "--port", port, cwd=tmp_path, code=2, **PATHS)
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert f"cannot listen on 127.0.0.1 port {port}" in line
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slots": 0}, "--slots 0: must be 1 to"),
        ({"slots": 1025}, "--slots 1025: must be 1 to"),
        ({"max_queue": -1}, "--max-queue -1: must be 0 to"),
        ({"port": 70000}, "--port 70000: must be 0"),
        ({"timeout_s": 0.0}, "--timeout-seconds 0.0: must be above 0"),
        ({"timeout_s": math.nan}, "--timeout-seconds nan"),
        ({"drain_s": -1.0}, "--drain-seconds -1.0"),
        ({"api_key_file": "absent"}, "--api-key-file absent cannot be read"),
        ({"api_key_file": "."}, "--api-key-file . cannot be read"),
        ({"api_key_file": "empty"}, "empty is empty: write one key per line"),
        ({"api_key_file": "spaced"}, "key 2 contains a space"),
        ({"api_key_file": "large"}, "larger than 65536 bytes"),
        ({"allow_origins": ["https://example.org/"]}, "--allow-origin 'https://example.org/': must be an origin"),
        ({"overrides": ["data.tokenizer=./absent"]}, "no such tokenizer folder"),
        ({"overrides": ["model.layer=3"]}, "model.layer"),
        ({"host": "256.0.0.1"}, "cannot listen on 256.0.0.1"),
        ({"host": "a" * 70}, "cannot listen on aaa"),
        ({"host": ""}, "cannot listen on "),
    ],
)
def test_what_cannot_be_served_is_reported_before_the_engine_opens(tmp_path, monkeypatch, options, words):
    write_run(tmp_path)
    (tmp_path / "empty").write_text("\n  \n")
    (tmp_path / "spaced").write_text("fine\nnot fine\n")
    (tmp_path / "large").write_text("key\n" * 20_000)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(words)):
        serving.run(
            "config.json",
            options.pop("overrides", []),
            serving.ServeOptions(**{"port": 0, **options}),
            unopened,
        )


def unopened(config: Config, checkpoint: str, *, slots: int) -> Any:
    raise AssertionError("it came to opening the engine")


@pytest.mark.parametrize(
    ("mode", "host", "keys", "warning"),
    [
        (0o644, "127.0.0.1", True, "all users of this machine can read"),
        (0o600, "127.0.0.1", True, None),
        (0o600, "127.0.0.1", False, None),
        (0o600, "localhost", False, None),
        (0o600, "0.0.0.0", True, None),
        (0o600, "0.0.0.0", False, "anyone can use this server"),
        (0o600, "LOCALHOST", False, None),
        (0o600, "127.0.0.2", False, None),
        (0o600, "::1", False, None),
        (0o600, "::", False, "anyone can use this server"),
    ],
)
def test_who_may_reach_the_server_is_warned_of(tmp_path, monkeypatch, capfd, mode, host, keys, warning):
    write_run(tmp_path)
    (tmp_path / "keys").write_text("key\n")
    os.chmod(tmp_path / "keys", mode)
    monkeypatch.chdir(tmp_path)

    def refuse(config: Config, checkpoint: str, *, slots: int) -> Any:
        raise UserError(f"nothing to serve in {checkpoint} with {slots} slots")

    options = serving.ServeOptions(host=host, port=0, api_key_file="keys" if keys else None)
    with pytest.raises(UserError, match="nothing to serve in run with 8 slots"):
        serving.run("config.json", [], options, refuse)
    errors = capfd.readouterr().err
    for words in ("all users of this machine can read", "anyone can use this server"):
        assert (words in errors) == (words == warning)
