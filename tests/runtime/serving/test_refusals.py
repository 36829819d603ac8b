"""Error responses and their messages; keys, sizes of bodies, CORS."""

import gzip
import json

import pytest
from support.served import KEY, refusal, serve
from support.wire import body_of, connect, read_to_end, receive

from mesh_transformer.runtime.serving.access import MAX_BODY_BYTES
from mesh_transformer.runtime.serving.protocol import ErrorResponse

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server():
    with serve() as served:
        yield served


@pytest.fixture(scope="module")
def locked():
    with serve(keys=["another-key", KEY]) as served:
        yield served


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": []}, "prompt", "list of token IDs"),
        ({"prompt": [[]]}, "prompt", "none of them empty"),
        ({"prompt": ["a", [1]]}, "prompt", "only texts, or only"),
        ({"prompt": [1, "a"]}, "prompt", "only texts, or only"),
        ({"prompt": [True]}, "prompt", "only texts, or only"),
        ({"prompt": [1.5]}, "prompt", "only texts, or only"),
        ({"prompt": {"a": 1}}, "prompt", "list of token IDs"),
        ({"prompt": [257]}, "prompt", "no token 257; token IDs are 0 to 256"),
        ({"prompt": [3, -1]}, "prompt", "no token -1"),
        ({"prompt": ["a"] * 129}, "prompt", "129 prompts"),
        ({"prompt": ["a"] * 65, "n": 2}, "n", "65 prompts x n 2"),
        ({"prompt": ["a"] * 21}, None, "at most 20"),
        ({"model": "gpt-5"}, "model", "'tiny'"),
        (
            {"max_tokens": 64},
            "prompt",
            "1 tokens and max_tokens is 64: the sum is 65, more than the context of 64",
        ),
        ({"prompt": "a" * 65}, "prompt", "the prompt has 65 tokens, more than the context of 64 tokens: shorten it"),
        ({"prompt": "a" * 65, "max_tokens": 5}, "prompt", "the prompt has 65 tokens, more than the context of 64"),
        ({"prompt": "a" * 64}, "prompt", "64 tokens and fills the context of 64 tokens, which leaves no room"),
        ({"prompt": "a" * 60}, "prompt", "60 tokens and max_tokens is 16 by default: the sum is 76, more than the"),
        ({"prompt": "a" * 60, "max_tokens": 5}, "prompt", "60 tokens and max_tokens is 5: the sum is 65"),
        ({"max_tokens": -1}, "max_tokens", "0 or more"),
        ({"max_tokens": 2.5}, "max_tokens", "integer; got 2.5"),
        ({"max_tokens": "3.5"}, "max_tokens", "integer; got '3.5'"),
        ({"max_tokens": "-3"}, "max_tokens", "integer; got '-3'"),
        ({"max_tokens": "9" * 5000}, "max_tokens", "integer; got '999"),
        ({"max_tokens": "9" * 10}, "max_tokens", "less than 2147483648"),
        ({"max_tokens": 1e300}, "max_tokens", "less than 2147483648"),
        ({"max_tokens": True}, "max_tokens", "integer; got true"),
        ({"min_tokens": 17}, "min_tokens", "max_tokens (16)"),
        ({"temperature": -0.5}, "temperature", "0 (greedy) or more"),
        ({"temperature": 10**400}, "temperature", "number"),
        ({"temperature": 1e39}, "temperature", "at most 1,000,000; got 1e+39"),
        ({"top_p": -0.1}, "top_p", "0 or more"),
        ({"top_p": 1.1}, "top_p", "at most 1"),
        ({"top_k": -2}, "top_k", "0 (all) or more"),
        ({"min_p": 2}, "min_p", "0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"repetition_penalty": 1e39}, "repetition_penalty", "above 0: 0.000001 to 1,000,000; got 1e+39"),
        ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
        ({"no_repeat_ngram_size": 65}, "no_repeat_ngram_size", "0 (off) to 64"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "not a token ID"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": {"1": "2"}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": {"257": 1}}, "logit_bias", "no token 257"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1025 entries"),
        ({"logit_bias": [1]}, "logit_bias", "object"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"seed": "1"}, "seed", "integer"),
        ({"stop": ""}, "stop", "1 to 1000 characters"),
        ({"stop": ["a"] * 1001}, "stop", "at most 1000"),
        ({"stop": [1]}, "stop", "text or a list"),
        ({"stop_token_ids": list(range(16))}, "stop_token_ids", "at most 15"),
        ({"stop_token_ids": 3}, "stop_token_ids", "list of token IDs"),
        ({"stop_token_ids": [257]}, "stop_token_ids", "no token 257"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"best_of": 2}, "best_of", "must be n (1)"),
        ({"logprobs": 21}, "logprobs", "0 to 20"),
        ({"logprobs": -1}, "logprobs", "0 to 20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"suffix": "b"}, "suffix", "cannot insert"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        ({"stream": True, "stream_options": 3}, "stream_options", "got 3"),
        ({"stream": 1}, "stream", "got 1"),
        ({"echo": "yes"}, "echo", "got 'yes'"),
        ({"prompt": [10**400]}, "prompt", "no token a whole number with too many digits"),
        ({"prompt": [None]}, "prompt", "only texts, or only"),
        ({"prompt": [[[1]]]}, "prompt", "only texts, or only"),
        ({"max_tokens": 10**4300 - 1}, "max_tokens", "less than 2147483648"),
        ({"min_tokens": 10**400}, "min_tokens", "less than"),
        ({"top_k": 2**31}, "top_k", "less than"),
        ({"logprobs": 2**31}, "logprobs", "less than"),
        ({"stop": ["a", ""]}, "stop", "1 to 1000 characters"),
        ({"n": 1.0}, "n", "integer; got 1.0"),
        ({"model": ""}, "model", "no model ''"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(server, fields, param, words):
    content = json.dumps({"prompt": "a", **fields})
    error = refusal(
        server.client.post("/v1/completions", content=content, headers=JSON),
        404 if param == "model" else 400,
    )
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "must be a JSON object"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'"prompt"', "must be a JSON object"),
        (b"\xff\xfe", "body"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000, "body"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}", "body"),
        (b'{"prompt": "a", "logit_bias": {"1": NaN}}', "logit_bias"),
    ],
)
def test_a_body_that_is_no_request(server, body, words):
    error = refusal(server.client.post("/v1/completions", content=body, headers=JSON), 400)
    assert words in error["message"]


def test_a_million_wrong_elements_are_one_fault(server):
    body = b'{"prompt": [' + b"null," * 700_000 + b"null]}"
    assert len(body) < MAX_BODY_BYTES
    error = refusal(server.client.post("/v1/completions", content=body, headers=JSON), 400)
    assert len(error["message"]) < 200


POSTED = [
    "/v1/completions", "/v1/chat/completions", "/v1/engines/tiny/completions", "/complete", "/tokenize", "/detokenize",
]  # fmt: skip


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (None, "the body has no Content-Type: "),
        ("", "the body has no Content-Type: "),
        ("text/plain", "the body has Content-Type 'text/plain': "),
        ("text/plain; application/json", "Content-Type 'text/plain; application/json': "),
        ("application/json, text/plain", "Content-Type 'application/json, text/plain': "),
        ("application/x-www-form-urlencoded", "Content-Type 'application/x-www-form-urlencoded': "),
        ("multipart/form-data; boundary=x", "Content-Type 'multipart/form-data; boundary=x': "),
        ("application/vnd.x+json", "Content-Type 'application/vnd.x+json': "),
        ("x" * 5000, "Content-Type 'xxx"),
    ],
)
def test_the_type_of_the_body_must_be_json(server, path, kind, words):
    """A web page of any site may send a body of another type, or of none, without a preflight."""
    headers = {} if kind is None else {"Content-Type": kind}
    calls = len(server.engine.calls)
    error = refusal(server.client.post(path, content=b'{"prompt": "a", "tokens": [1]}', headers=headers), 400)
    assert words in error["message"]
    assert error["message"].endswith(": send JSON with Content-Type: application/json")
    assert len(error["message"]) < 300
    assert len(server.engine.calls) == calls


@pytest.mark.parametrize("kind", ["Application/JSON; charset=utf-8", "application/json;charset=UTF-8"])
def test_json_may_name_its_charset(server, kind):
    response = server.client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
    assert response.status_code == 200


def test_a_path_that_does_not_exist_is_a_404_with_any_body(server):
    assert "POST /v1/completions" in refusal(server.client.post("/v1/files", files={"file": b"a"}), 404)["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(server, chunked):
    body = b'{"prompt": "' + b"a" * MAX_BODY_BYTES + b'"}'
    content = (body[i : i + 65536] for i in range(0, len(body), 65536)) if chunked else body
    response = server.client.post("/v1/completions", content=content, headers=JSON)
    assert str(MAX_BODY_BYTES) in refusal(response, 413)["message"]
    assert server.complete("a")["choices"]


@pytest.mark.parametrize(
    "headers", ["", "Connection: close\r\n", "Authorization: Bearer wrong\r\nConnection: close\r\n"]
)
def test_the_refusal_of_a_large_body_arrives(server, locked, headers):
    """The client sends the whole body before it reads the response."""
    size = 4 * MAX_BODY_BYTES
    with connect((locked if "wrong" in headers else server).url) as client:
        client.sendall(
            f"POST /complete HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {size}\r\n\r\n".encode()
        )
        for _ in range(size // 65536):
            client.sendall(b" " * 65536)
        answer = receive(client, b"}}")
    assert answer.startswith(b"HTTP/1.1 401 " if "wrong" in headers else b"HTTP/1.1 413 ")
    ErrorResponse.model_validate(body_of(answer), strict=True)


@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
def test_a_body_with_two_lengths_ends_its_connection(server, method):
    """RFC 9112, 6.1: the bytes after the body may be another client's request, or a part of the body."""
    head = f"{method} /complete HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(server.url) as client:
        client.sendall(head.encode() + b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = read_to_end(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"\r\nconnection: close\r\n" in answer.lower()
    assert "Transfer-Encoding" in body_of(answer)["error"]["message"]


def test_a_body_in_pieces_is_read(server):
    content = iter([b'{"prompt"', b': "a", "se', b'ed": 1}'])
    response = server.client.post("/v1/completions", content=content, headers=JSON)
    assert response.json()["choices"][0]["text"] == server.complete("a", seed=1)["choices"][0]["text"]


def test_a_compressed_body_is_refused_in_words(server):
    body = gzip.compress(b'{"prompt": "a"}')
    response = server.client.post("/v1/completions", content=body, headers={**JSON, "Content-Encoding": "gzip"})
    assert "uncompressed" in refusal(response, 415)["message"]


def test_a_message_repeats_no_more_than_a_little_of_what_was_sent(server):
    error = refusal(server.post({"prompt": "a", **dict.fromkeys(("n", "seed", "top_p"), "x" * 5000)}), 400)
    assert len(error["message"]) < 1100


def test_what_is_no_http_gets_an_error_object_too(server):
    with connect(server.url) as client:
        client.sendall(b"hello\r\n\r\n")
        answer = read_to_end(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    ErrorResponse.model_validate(body_of(answer), strict=True)


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/version", "/v1/models"])
def test_head_is_get_without_the_body(server, path):
    head, get = server.client.head(path), server.client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_the_description_names_no_status_that_is_not_sent(server):
    for path in server.client.get("/openapi.json").json()["paths"].values():
        assert all("422" not in operation["responses"] for operation in path.values())


def test_a_prompt_that_is_too_long_has_openais_code(server):
    for fields in ({"prompt": "a" * 65}, {"prompt": "a" * 60}, {"prompt": "a", "max_tokens": 64}):
        assert refusal(server.post(fields), 400)["code"] == "context_length_exceeded"
    assert server.complete("a" * 64, max_tokens=0, echo=True)["choices"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/embeddings", "/chat/completions", "/v1"])
def test_a_404_names_the_endpoints_that_exist(server, path):
    message = refusal(server.post({"model": "tiny"}, path), 404)["message"]
    assert message.startswith(f"this server has no '{path}'; it has ")
    for endpoint in ("POST /v1/completions", "POST /v1/chat/completions", "POST /complete", "GET /v1/models", "GET /"):
        assert f" {endpoint}," in message


def test_paths_and_methods_that_are_not_there(server):
    other = server.post({"prompt": "a"}, "/v1/engines/davinci/completions")
    assert refusal(other, 404)["code"] == "model_not_found"
    wrong = server.client.get("/v1/completions")
    assert refusal(wrong, 405)["message"] == "'/v1/completions' does not take GET: use POST"
    assert wrong.headers["allow"] == "POST"
    assert refusal(server.client.get("/v1/models/other"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        KEY,
        "Bearer",
        "Bearer wrong",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Basic {KEY}",
        "Bearer \xfc",
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/complete"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
    ],
)
def test_without_a_key_nothing_is_served(locked, header, method, path):
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    response = locked.client.request(method, path, json={"prompt": "a"}, headers=headers)
    assert refusal(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_each_key_opens_and_some_paths_need_none(locked):
    for key in (KEY, "another-key"):
        response = locked.post({"prompt": "a"}, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200
    for path in ("/", "/page/page.js", "/health", "/version", "/openapi.json"):
        assert locked.client.get(path).status_code == 200
    preflight = locked.client.options("/complete")
    assert preflight.status_code == 204
    assert "Authorization" in preflight.headers["access-control-allow-headers"]
