"""Requests to the server of device_serve.py, with an engine without a model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import h11
from support.chat_templates import TOOL_TEMPLATES, chat_folder
from support.mutations import mutated_bytes, mutated_json
from support.served import Served, serve
from support.wire import connect

from fuzz.harness import Attempt
from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.runtime.serving.protocol import ErrorResponse

_SAMPLED = {
    "model": "tiny", "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "min_tokens": 1,
    "logit_bias": {"5": 1.5}, "seed": 7, "stop": ["x", "yz"], "stop_token_ids": [9], "ignore_eos": False, "n": 2,
    "stream": False, "user": "me",
}  # fmt: skip
_CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "Hé"}]}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "g",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
_CALLED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "reasoning": "hm",
     "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}]},
    {"role": "tool", "tool_call_id": "1", "content": "c"},
]  # fmt: skip
_STREAMED = {**_SAMPLED, "stream": True}
# a valid body for each route, of some two
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "ab", "max_tokens": 4, "logprobs": 2, "echo": True, "best_of": 2, **_SAMPLED}),
    ("/v1/completions",
     {"prompt": [[5, 6], [7]], "max_tokens": 3, **_STREAMED, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": _CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, **_SAMPLED}),
    ("/v1/chat/completions",
     {"messages": _CHAT, "max_completion_tokens": 3, "chat_template_kwargs": {"x": 1}, **_STREAMED}),
    ("/v1/chat/completions",
     {"messages": _CALLED, "tools": [_TOOL], "tool_choice": "auto", "reasoning_effort": "low", "max_tokens": 3}),
    ("/complete", {"context": "ab", "top_p": 0.9, "temp": 0.7, "length": 4, "top_k": 5, "stop": ["x"]}),
    ("/tokenize", {"model": "tiny", "prompt": "ab", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": _CHAT, "add_generation_prompt": True, "tools": [_TOOL], "chat_template_kwargs": {}}),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6, 7]}),
]  # fmt: skip
# what chat requests are refused for, and unknown fields
DONORS = [
    {
        "tools": [], "tool_choice": "required", "grammar": "root", "response_format": {"type": "text"}, "documents": [],
        "echo": True, "suffix": "",
        "best_of": 1,
    },
    *(body for _, body in BODIES),
]  # fmt: skip
PATHS = [
    "/", "/health", "/metrics", "/version", "/openapi.json", "/v1/models", "/v1/models/tiny",
    "/v1/engines/tiny/completions", "/x",
]  # fmt: skip
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "X"]
HEADERS = [
    "Content-Type: text/plain", "Content-Type: application/json; charset=utf-16", "Content-Encoding: gzip",
    "Expect: 100-continue", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Content-Length: 0",
    "Content-Length: -1", "Content-Length: 99999999999999999999", "Authorization: Bearer x", "Origin: http://x",
    "Upgrade: websocket", "Upgrade: h2c", "Connection: upgrade", "Range: bytes=0-1", "Host: y",
    "Accept: text/event-stream", "If-None-Match: *", "X: " + "y" * 70_000, "X: \x00", "Cookie: a=b; c",
    "X-Forwarded-For: 1.2.3.4", " folded",
]  # fmt: skip


def mutated_request(random: Random) -> bytes:
    """The bytes of a request whose body, head or bytes are mutated."""
    path, body = random.choice(BODIES)
    method, content, lines = "POST", json.dumps(body).encode(), []
    kind = random.choice(["body"] * 7 + ["head", "head", "bytes"])
    if kind == "body":
        content = mutated_json(random, body, DONORS)
    elif kind == "head":
        method, path = random.choice([method, random.choice(METHODS)]), random.choice([path, random.choice(PATHS)])
        if random.random() < 0.3:
            path = mutated_bytes(random, path.encode()).decode("latin-1").replace(" ", "+")
        lines = random.sample(HEADERS, random.randrange(3))
    head = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    raw = "\r\n".join([*head, *lines, "", ""]).encode("latin-1") + content
    return mutated_bytes(random, raw) if kind == "bytes" else raw


def _method(raw: bytes) -> bytes | None:
    """The method of a request, empty if it is not HTTP; None if the server has to wait for more of the request."""
    reader, method = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 16), b""
    reader.receive_data(raw)
    try:
        while type(event := reader.next_event()) is not h11.EndOfMessage:
            # h11 takes a request without a byte for the end of the connection
            if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return None
            if isinstance(event, h11.Request):
                method = event.method
    except h11.RemoteProtocolError:
        return method
    return method


def ask(server: Served, raw: bytes) -> str:
    """The status of the response to a request, which must not be one of a failure.

    Raises:
        AssertionError: the server failed, or the response has not the form of its status.
    """
    method = _method(raw)
    with connect(server.url) as client:
        client.sendall(raw)
        if method is None:
            return "unfinished request"
        reader, body = h11.Connection(h11.CLIENT), b""
        reader.send(
            h11.Request(method="HEAD" if method == b"HEAD" else "GET", target="/", headers=[("Host", "localhost")])
        )
        reader.send(h11.EndOfMessage())
        while type(event := reader.next_event()) is not h11.EndOfMessage:
            if event is h11.NEED_DATA:
                reader.receive_data(client.recv(1 << 16))
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                body += event.data
    status, kind = response.status_code, dict(response.headers).get(b"content-type", b"")
    assert status < 500, f"status {status}: {body[:300]!r}"
    if status >= 400 and method != b"HEAD":
        ErrorResponse.model_validate_json(body, strict=True)
    elif kind == b"application/json" and body:
        json.loads(body)
    elif kind.startswith(b"text/event-stream"):
        assert body.endswith(b"data: [DONE]\n\n")
        events = [json.loads(event.removeprefix(b"data: ")) for event in body.split(b"\n\n")[:-2]]
        assert not any("error" in event for event in events), events[-1]
    return f"status {status}"


@contextmanager
def fuzzer(folder: Path) -> Iterator[Attempt]:
    """Sends a request over a socket of its own. The server must answer, and go on."""
    tokenizer = load_tokenizer(str(chat_folder(folder, TOOL_TEMPLATES["hermes"])))
    sizes = {"slots": 8, "max_queue": 256, "context": 1024, "max_prefill_tokens": 256}
    with serve(tokenizer=tokenizer, vocab=tokenizer.n_vocab, **sizes) as server:

        def attempt(random: Random) -> str:
            status = ask(server, mutated_request(random))
            assert server.loop.state == "ok", server.loop.state
            return status

        for path, body in BODIES:
            response = server.post(body, path)
            assert response.status_code == 200, response.text
        yield attempt
        assert server.client.get("/health").json()["status"] == "ok"
