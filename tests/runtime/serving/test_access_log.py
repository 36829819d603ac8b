"""Request IDs, the count of answers, and the access log."""

import re

import pytest
from support.served import Served, serve
from support.waiting import until
from support.wire import ask, connect

BODY = {"prompt": "a secret prompt", "max_tokens": 7, "ignore_eos": True}
LINE = re.compile(
    r"answer id=(\S+) route=(\S+) status=(\S+) prompt_tokens=(\d+) completion_tokens=(\d+) "
    r"first_ms=([\d.]+) total_ms=([\d.]+)"
)


def counted(server: Served) -> dict[tuple[str, str], float]:
    """The answers by route and status."""
    lines = server.client.get("/metrics").text.splitlines()
    pattern = re.compile(r'mesh_transformer_answers_total\{route="(.*)",status="(.*)"\} (\S+)')
    return {(match[1], match[2]): float(match[3]) for line in lines if (match := pattern.fullmatch(line))}


@pytest.mark.parametrize(
    ("given", "kept"),
    [("a.B-9_", True), ("a" * 64, True), ("a" * 65, False), ("a b", False), ("", False), ("é", False)],
)
def test_request_ids(given: str, kept: bool) -> None:
    with serve() as server:
        headers = [(b"x-request-id", given.encode("latin-1"))]
        ids = [
            server.client.post("/v1/completions", json=BODY, headers=headers).headers["x-request-id"],
            server.client.get("/nothing", headers=headers).headers["x-request-id"],
            server.client.get("/health", headers=[*headers, (b"host", b"evil.example")]).headers["x-request-id"],
        ]
    if kept:
        assert ids == [given] * 3
    else:
        assert len(set(ids)) == 3
        assert all(re.fullmatch(r"req-[0-9a-f]{24}", made) for made in ids)


def test_answers_are_counted_by_route_and_status() -> None:
    with serve(keys=["key"]) as server:
        key = {"Authorization": "Bearer key"}
        server.client.headers.update(key)
        for path in ("/v1/models/tiny", "/v1/models/other", "/v1/models/another", "/no/such", "/nor/this"):
            server.client.get(path)
        server.client.post("/v1/completions", json={"prompt": 3})
        server.client.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer wrong"})
        server.client.post("/v1/completions", json={**BODY, "stream": True})
        server.client.get("/v1/completions")
        server.client.get("/nor/that", headers={"Authorization": "Bearer wrong"})
        counts = counted(server)
    assert counts == {
        ("/v1/models/{name:path}", "200"): 1, ("/v1/models/{name:path}", "404"): 2, ("unknown", "404"): 2,
        ("unknown", "401"): 1,
        ("/v1/completions", "400"): 1, ("/v1/completions", "401"): 1, ("/v1/completions", "200"): 1,
        ("/v1/completions", "405"): 1,
    }  # fmt: skip


def test_a_line_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with serve(access_log=True, delay=0.01) as server:
        for stream in (False, True):
            server.client.post("/v1/completions", json={**BODY, "stream": stream}, headers={"x-request-id": "mine"})
        server.client.post("/complete", json={"context": "a secret prompt", "top_p": 1, "temp": 1, "length": 3})
        with connect(server.url) as client:
            client.sendall(ask(max_tokens=50, stream=True))
            until(lambda: server.loop.busy)
        until(lambda: sum(message.startswith("answer ") for message in caplog.messages) == 4)
    lines = [match.groups() for message in caplog.messages if (match := LINE.fullmatch(message))]
    assert [line[:5] for line in lines[:2]] == [("mine", "/v1/completions", "200", "15", "7")] * 2
    # the first bytes of a whole answer are its last
    (first, total), (first_of_stream, total_of_stream) = (map(float, line[5:]) for line in lines[:2])
    assert 70 <= first <= total
    assert 0 < first_of_stream < total_of_stream
    assert total_of_stream >= 70
    assert lines[2][1:4] == ("/complete", "200", "0")
    assert lines[3][1] == "/v1/completions"
    assert "secret" not in "".join(caplog.messages)


def test_no_line_without_the_option(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with serve() as server:
        server.complete("a")
    assert not [message for message in caplog.messages if message.startswith("answer ")]
