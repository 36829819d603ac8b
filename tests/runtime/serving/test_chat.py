"""POST /v1/chat/completions: prompts against transformers' chat template, messages against the fake engine alone."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from support.chat_templates import CHATML, SPECIAL, chat_folder
from support.fake_engine import Completion, alone
from support.served import NAME, Served, refusal, serve
from transformers import AutoTokenizer

from mesh_transformer.data.tokens.tokenizer import HubTokenizer, Tokenizer, load_tokenizer
from mesh_transformer.infer.requests import OPTIONS, SamplingParams
from mesh_transformer.runtime.serving.chat_protocol import ChatLogprobs, ChatResponse
from mesh_transformer.runtime.serving.fields import CHAT_REFUSED
from mesh_transformer.runtime.serving.protocol import Usage

VOCAB, CONTEXT = 259, 192
CHAT = [{"role": "user", "content": "Hi <3"}, {"role": "assistant", "content": "Hé"}, {"role": "user", "content": "2?"}]
PATH = "/v1/chat/completions"


class ChatDelta(BaseModel):
    """The addition of an event to a message."""

    role: str | None = None
    content: str | None = None


class ChatPart(BaseModel):
    """The choice of an event."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatEvent(BaseModel):
    """An event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatPart]
    usage: Usage | None = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    with serve(tokenizer=tokenizer, vocab=VOCAB, context=CONTEXT, max_prefill_tokens=64) as served:
        yield served


@pytest.fixture(scope="module")
def prompt(theirs: Any) -> list[int]:
    """The tokens of CHAT."""
    return theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)


def made(prompt: list[int], **params: Any) -> Completion:
    return alone(prompt, SamplingParams(**{"stop_token_ids": (0, 2), **params}), VOCAB)


def text_of(tokenizer: Tokenizer, completion: Completion) -> str:
    return tokenizer.decode(token.id for token in completion.tokens)


def chat(server: Served, **fields: Any) -> dict[str, Any]:
    response = server.post({"messages": CHAT, **fields}, PATH)
    assert response.status_code == 200, response.text
    ChatResponse.model_validate(response.json(), strict=True)
    return response.json()


def events(server: Served, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; the last must be [DONE]."""
    with server.client.stream("POST", PATH, json={"messages": CHAT, **fields, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    found = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    for event in found:
        ChatEvent.model_validate(event, strict=True)
    return found


def test_a_message_follows_the_prompt_of_the_template(server: Served, tokenizer: Tokenizer, prompt: list[int]) -> None:
    answer = chat(server, seed=3, max_tokens=9)
    wanted = text_of(tokenizer, made(prompt, seed=3, max_tokens=9))
    message = {"role": "assistant", "content": wanted, "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": 9, "total_tokens": len(prompt) + 9
    }  # fmt: skip
    assert (answer["object"], answer["model"]) == ("chat.completion", NAME)
    assert answer["id"].startswith("chatcmpl-")


def test_a_stream_is_the_same_message_in_pieces(server: Served) -> None:
    fields = {"seed": 4, "n": 2, "max_completion_tokens": 20}
    whole = chat(server, **fields)
    found = events(server, **fields, stream_options={"include_usage": True})
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    assert len({event["id"] for event in found}) == 1
    assert (found[-1]["choices"], found[-1]["usage"]) == ([], whole["usage"])
    assert all(event["usage"] is None for event in found[:-1])
    for choice in whole["choices"]:
        parts = [part for event in found for part in event["choices"] if part["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all(set(part["delta"]) <= {"content"} for part in parts[1:])
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
    assert all("usage" not in event for event in events(server, max_tokens=1))


@pytest.mark.parametrize("end", [0, 2])
def test_each_end_token_of_the_folder_ends_a_message(
    server: Served, tokenizer: Tokenizer, prompt: list[int], end: int
) -> None:
    """<|im_end|> is in generation_config.json only, <|endoftext|> is the tokenizer's own. Neither is in the text."""

    def ends(seed: int) -> bool:
        tokens = [token.id for token in made(prompt, seed=seed, max_tokens=60).tokens]
        return tokens[-1] == end and 3 < len(tokens) < 60 and 1 not in tokens

    seed = next(seed for seed in range(VOCAB) if ends(seed))
    wanted = made(prompt, seed=seed, max_tokens=60)
    answer = chat(server, seed=seed, max_tokens=60)
    (choice,) = answer["choices"]
    wanted.tokens.pop()
    assert (choice["message"]["content"], choice["finish_reason"]) == (text_of(tokenizer, wanted), "stop")
    assert not any(name in choice["message"]["content"] for name in SPECIAL)
    assert answer["usage"]["completion_tokens"] == len(wanted.tokens) + 1
    streamed = [part for event in events(server, seed=seed, max_tokens=60) for part in event["choices"]]
    assert "".join(part["delta"].get("content", "") for part in streamed) == choice["message"]["content"]
    assert streamed[-1]["finish_reason"] == "stop"
    going_on = chat(server, seed=seed, max_tokens=len(wanted.tokens) + 2, ignore_eos=True)
    assert going_on["choices"][0]["finish_reason"] == "length"
    completed = server.complete(prompt, seed=seed, max_tokens=60)["choices"][0]
    assert (completed["text"], completed["finish_reason"]) == (choice["message"]["content"], "stop")


def test_without_a_limit_a_message_may_fill_the_context(server: Served, prompt: list[int]) -> None:
    seed = next(
        seed
        for seed in range(VOCAB)
        if made(prompt, seed=seed, max_tokens=CONTEXT - len(prompt)).finish_reason == "length"
    )
    answer = chat(server, seed=seed)
    assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (CONTEXT, "length")
    assert chat(server, seed=seed, max_tokens=3, max_completion_tokens=5)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_a_message_before_it(server: Served, stream: bool) -> None:
    text = chat(server, seed=4, max_tokens=40)["choices"][0]["message"]["content"]
    stop = next(text[i : i + 2] for i in range(5, 30) if "\ufffd" not in text[i : i + 2])
    fields = {"seed": 4, "max_tokens": 40, "stop": ["nowhere", stop]}
    if stream:
        parts = [part for event in events(server, **fields) for part in event["choices"]]
        found = "".join(part["delta"].get("content", "") for part in parts), parts[-1]["finish_reason"]
    else:
        choice = chat(server, **fields)["choices"][0]
        found = choice["message"]["content"], choice["finish_reason"]
    assert found == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize("top", [None, 0, 3])
def test_logprobs_are_those_of_the_tokens(
    server: Served, tokenizer: Tokenizer, prompt: list[int], top: int | None
) -> None:
    fields = {"seed": 1, "max_tokens": 12, "logprobs": True, "top_logprobs": top}
    wanted = made(prompt, seed=1, max_tokens=12, logprobs=top or 0).tokens
    shown = chat(server, **fields)["choices"][0]["logprobs"]["content"]
    parts = [part for event in events(server, **fields) for part in event["choices"]]
    assert shown == [token for part in parts if part["logprobs"] for token in part["logprobs"]["content"]]
    assert [token["logprob"] for token in shown] == [token.logprob for token in wanted]
    assert [bytes(token["bytes"]) for token in shown] == [tokenizer.token_bytes(token.id) for token in wanted]
    for token, place in zip(shown, wanted, strict=True):
        assert [(bytes(other["bytes"]), other["logprob"]) for other in token["top_logprobs"]] == [
            (tokenizer.token_bytes(other), logprob) for other, logprob in place.top
        ]
        assert len(token["top_logprobs"]) == (top or 0)


def test_parts_of_a_content_are_one_text(server: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answers = [
        chat(server, messages=[{"role": "user", "content": content}], seed=1, max_tokens=9)["choices"]
        for content in (parts, "a\nb", "a\n\nb")
    ]
    assert answers[0] == answers[1] != answers[2]


def test_fields_of_a_request_reach_the_template(tokenizer: HubTokenizer) -> None:
    source = "{{ messages[0].name }}|{{ add_generation_prompt }}|{{ enable_thinking }}|{{ bos_token }}|{{ eos_token }}"
    messages = [{"role": "user", "content": "x", "name": "Ann", "refusal": None}]
    fields = {"messages": messages, "add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}}
    with other_template(tokenizer, source) as served:
        tokens = served.post(fields, "/tokenize").json()["tokens"]
        assert tokenizer.decode(tokens, special_names=True) == "Ann|False|False|<|endoftext|>|<|endoftext|>"
        assert chat(served, **fields, max_tokens=1)["usage"]["prompt_tokens"] == len(tokens)


def test_sampling_fields_reach_the_engine(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0, "top_k": 7, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": -0.3, "no_repeat_ngram_size": 3, "min_tokens": 2,
    }  # fmt: skip
    assert fields.keys() >= OPTIONS.keys()
    seen, insert = [], server.engine.insert
    monkeypatch.setattr(
        server.engine,
        "insert",
        lambda slot, prompt, params, **how: seen.append(params) or insert(slot, prompt, params, **how),
    )
    chat(server, **fields, logit_bias={"7": -100}, seed=-1, stop_token_ids=[9], max_tokens=5)
    assert {name: getattr(seen[0], name) for name in fields} == fields
    assert (seen[0].logit_bias, seen[0].stop_token_ids, seen[0].seed) == (((7, -100.0),), (0, 2, 9), 2**32 - 1)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": None}, "messages", "missing"),
        ({"messages": []}, "messages", "list of messages"),
        ({"messages": "Hi"}, "messages", "list of messages"),
        ({"messages": CHAT * 3334}, "messages", "at most 10000"),
        ({"messages": ["Hi"]}, "messages", "message 0 must be an object with role and content; got 'Hi'"),
        ({"messages": [{"content": "a"}]}, "messages", "must have a role"),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages", "must have a role"),
        ({"messages": [{"role": "x" * 101, "content": "a"}]}, "messages", "must have a role"),
        ({"messages": [{"role": "user"}]}, "messages", "message 0 must have a content"),
        ({"messages": [*CHAT, {"role": "user", "content": None}]}, "messages", "message 3 must have a content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages", "must have a content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages",
         "not text ('image_url')"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages", "not text ('a')"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "not text"),
        ({"messages": [{"role": "assistant", "content": "", "audio": {"id": "1"}}]}, "messages", "message 0 has audio"),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages", "more than the context of 192"),
        ({"messages": [{"role": "user", "content": "a" * 173}]}, "messages", "has 192 tokens and fills the context"),
        ({"max_tokens": 190}, "messages", "max_tokens is 190"),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "1 or more"),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"logprobs": 3}, "logprobs", "got 3"),
        ({"stop_token_ids": list(range(3, 18))}, "stop_token_ids", "at most 14 besides the 2 end tokens"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "dictionary"),
        ({"model": "gpt-5"}, "model", "'tiny'"),
        ({"temperature": -1}, "temperature", "0 (greedy) or more"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools",
         "does not use tools"),
        ({"response_format": {"type": "json_object"}}, "response_format", "plain text"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "plain text"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "the model's tokenizer"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_is_allowed(
    server: Served, fields: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(server.post({"messages": CHAT, **fields}, PATH), 404 if param == "model" else 400)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("name", CHAT_REFUSED)
def test_a_field_that_would_change_the_answer_is_refused(server: Served, name: str) -> None:
    error = refusal(server.post({"messages": CHAT, name: {"a": 1}}, PATH), 400)
    assert error["param"] == name
    assert error["message"].startswith(f"{name} ")
    for neutral in (None, *CHAT_REFUSED[name][1]):
        chat(server, max_tokens=1, **{name: neutral})


def other_template(tokenizer: HubTokenizer, source: str | None) -> Any:
    """A server whose tokenizer has another chat template."""
    other = HubTokenizer.__new__(HubTokenizer)
    other.__dict__ = {**tokenizer.__dict__, "chat_template": source}
    return serve(tokenizer=other, vocab=VOCAB, context=CONTEXT)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "has no chat template: send the text as `prompt` to POST /v1/completions"),
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ 'a' * 99999999999 }}", "MiB of memory"),
        ("{% for i in range(9999) %}{{ 'a' * 1000 }}{% endfor %}", "more than 4194304 characters"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 1 s"),
    ],
)
def test_a_template_that_makes_no_prompt(tokenizer: HubTokenizer, source: str | None, words: str) -> None:
    """The request is refused, and the server goes on."""
    with other_template(tokenizer, source) as served:
        for path in (PATH, "/tokenize"):
            error = refusal(served.post({"messages": CHAT}, path), 400)
            assert words in error["message"]
            assert error["param"] == "messages"
        assert served.complete("a", max_tokens=1)["choices"]
        assert served.client.get("/v1/models").json()["data"][0]["chat"] is (source is not None)
        assert not served.engine.in_use


def test_a_chat_has_its_place_in_the_queue(tokenizer: Tokenizer) -> None:
    with serve(tokenizer=tokenizer, vocab=VOCAB, context=CONTEXT, slots=1, max_queue=1) as served:
        error = refusal(served.post({"messages": CHAT, "n": 3}, PATH), 400)
        assert "at most 2" in error["message"]
        served.engine.delay = 0.05
        asked = {"messages": CHAT, "n": 2, "stream": True, "ignore_eos": True}
        with served.client.stream("POST", PATH, json=asked) as response:
            # without this name, the garbage collector would close the stream
            lines = response.iter_lines()
            next(lines)
            full = served.post({"messages": CHAT}, PATH)
            assert refusal(full, 503)["code"] == "queue_full"
            assert full.headers["retry-after"]
        served.engine.delay = 0.0
        assert served.metric("prompt_tokens_total") > 0


def test_deep_variables_are_no_fault_of_the_server(server: Served) -> None:
    deep = '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template_kwargs": {"a": %s}}'
    for depth in (100, 400, 900, 5000):
        body = deep % ("[" * depth + "]" * depth)
        response = server.client.post(PATH, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400), depth
    assert chat(server, max_tokens=1)


def test_the_process_of_the_template_ends_with_the_server(tokenizer: Tokenizer) -> None:
    with serve(tokenizer=tokenizer, vocab=VOCAB, context=CONTEXT) as served:
        chat(served, max_tokens=1)
        template = served.model.chat_template
        assert template is not None
        process = template._process
    assert process.returncode == -signal.SIGKILL


def test_a_template_in_the_style_of_chatml_is_used_whole(server: Served, tokenizer: Tokenizer) -> None:
    tokens = server.post({"messages": CHAT}, "/tokenize").json()["tokens"]
    text = tokenizer.decode(tokens, special_names=True)
    assert text.startswith("<|im_start|>user\nHi <3<|im_end|>\n")
    assert text.endswith("<|im_start|>assistant\n")
    assert CHATML.count("<|im_start|>") == 2
