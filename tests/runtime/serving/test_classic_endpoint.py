"""POST /complete, as clients of the original program call it."""

import pytest
from support.fake_engine import alone
from support.served import expected, refusal, serve, text_of

from mesh_transformer.data.tokens.tokenizer import ByteTokenizer
from mesh_transformer.runtime.serving.model import ServedModel


@pytest.fixture(scope="module")
def server():
    with serve() as served:
        yield served


def seen_params(server, body: dict):
    """The parameters that the engine got, and the response."""
    seen, insert = [], server.engine.insert
    server.engine.insert = lambda slot, prompt, params, **how: (
        seen.append((prompt, params)),
        insert(slot, prompt, params, **how),
    )
    try:
        response = server.post(body, "/complete")
    finally:
        server.engine.insert = insert
    assert response.status_code == 200, response.text
    (prompt, params), *others = seen
    assert not others
    return prompt, params, response


def test_the_fields_of_the_original(server):
    body = {"context": "hello", "top_p": 0, "temp": 0.8, "length": "59"}
    prompt, params, response = seen_params(server, body)
    assert bytes(prompt) == b"hello"
    assert (params.top_p, params.temperature) == (0, 0.8)
    wanted = expected(b"hello", max_tokens=59, seed=params.seed)
    if wanted.finish_reason == "stop":
        wanted.tokens.pop()
    assert response.json() == {"completion": text_of(wanted)}


def test_numbers_as_strings_and_the_other_fields(server):
    _, params, _ = seen_params(
        server, {"context": "hello", "top_p": "0.5", "temp": "1", "length": 3, "top_k": 2, "stop": ["zzzz"]}
    )
    assert (params.top_p, params.temperature, params.top_k, params.max_tokens) == (0.5, 1, 2, 3)


def test_a_story_goes_on_beyond_the_context(server, monkeypatch):
    """The context is cut on the left, the window slides, and only the end-of-text token ends the completion before
    `length`."""
    monkeypatch.setattr(ServedModel, "end_tokens", lambda self: ())
    windows, insert = [], server.engine.insert

    def recording(slot, prompt, params, **how):
        windows.append((list(prompt), params))
        insert(slot, prompt, params, **how)

    monkeypatch.setattr(server.engine, "insert", recording)
    length, story = 150, "long ago " * 30
    for context in (story, "a" * 64, "a"):
        windows.clear()
        body = {"context": context, "top_p": 1, "temp": 1, "length": length}
        answer = server.post(body, "/complete").json()["completion"]
        assert sum(params.max_tokens for _, params in windows) == length
        text = list(context.encode())
        for window, params in windows:
            assert text[-len(window) :] == window
            assert len(window) + params.max_tokens <= 64
            assert len(window) >= min(len(text), 32)
            text += [token.id for token in alone(window, params, 257).tokens]
        assert ByteTokenizer().decode(text[len(context) :]) == answer
    assert server.metric("queue_seconds_count") == server.metric("time_to_first_token_seconds_count")


def test_a_stop_cuts_the_completion(server):
    _, params, response = seen_params(
        server, {"context": "x", "top_p": 1, "temp": 1, "length": 60, "stop": [chr(i) for i in range(16, 32)]}
    )
    text = text_of(expected(b"x", max_tokens=60, seed=params.seed))
    cuts = [text.index(chr(i)) for i in range(16, 32) if chr(i) in text]
    assert response.json()["completion"] == text[: min(cuts, default=len(text))]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"top_p": 1, "temp": 1}, "context is missing"),
        ({"context": "a", "temp": 1}, "top_p is missing"),
        ({"context": "a", "top_p": 1}, "temp is missing"),
        ({"context": 3, "top_p": 1, "temp": 1}, "string; got 3"),
        ({"context": "a", "top_p": "high", "temp": 1}, "top_p"),
        ({"context": "a", "top_p": 2, "temp": 1}, "top_p must be 0 or more, at most 1; got 2"),
        ({"context": "a", "top_p": 1, "temp": -1}, "temp must be"),
        ({"context": "a", "top_p": 1, "temp": 1, "length": 0}, "length must be 1 or more"),
        ({"context": "a", "top_p": 1, "temp": 1, "top_k": -1}, "top_k"),
        ([], "JSON object"),
    ],
)
def test_missing_and_wrong_fields_are_reported(server, body, words):
    response = server.post(body, "/complete")
    assert words in refusal(response, 400)["message"]
