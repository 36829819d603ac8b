"""Fields of requests: each that OpenAI or vLLM has is built, refused, or has no influence; those that vLLM added."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from support.chat_templates import chat_folder
from support.served import VOCAB, expected, refusal, serve, text_of
from transformers import AutoTokenizer

from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.runtime.serving.chat_protocol import ChatRequest, ChatResponse
from mesh_transformer.runtime.serving.fields import WITHOUT_INFLUENCE
from mesh_transformer.runtime.serving.protocol import CompletionRequest, CompletionResponse

FOLDER = Path(__file__).parent
FIELDS = json.loads((FOLDER / "request_fields.json").read_text())
BODIES = json.loads((FOLDER / "client_bodies.json").read_text())
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REQUESTS = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}
MESSAGES = [{"role": "user", "content": "Say"}]
BODY = {COMPLETIONS: {"prompt": "ab", "max_tokens": 2}, CHAT: {"messages": MESSAGES, "max_tokens": 2}}
# a value of each field that is built, and what it needs beside it
VALUES: dict[str, Any] = {
    "prompt": "abc", "messages": MESSAGES, "model": "tiny", "echo": True, "suffix": "", "best_of": 1, "n": 2,
    "frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"5": 1}, "max_tokens": 3, "seed": 1,
    "max_completion_tokens": 3, "stop": ["x"], "stream": True, "temperature": 0.5, "top_p": 0.5, "top_k": 5,
    "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [3], "include_stop_str_in_output": True,
    "ignore_eos": True, "min_tokens": 1, "skip_special_tokens": False, "allowed_token_ids": [3, 4],
    "prompt_logprobs": 1, "add_special_tokens": True, "return_tokens_as_token_ids": True, "return_token_ids": True,
    "bad_words": ["x"], "tools": None, "tool_choice": "none", "reasoning_effort": "low", "add_generation_prompt": False,
    "chat_template_kwargs": {"a": 1},
}  # fmt: skip
WITH_OTHERS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "continue_final_message": {"continue_final_message": True, "add_generation_prompt": False},
}


@pytest.fixture(scope="module")
def server():
    with serve() as served:
        yield served


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def chats(folder):
    """A server whose tokenizer has a chat template and special tokens."""
    tokenizer = load_tokenizer(str(folder))
    with serve(tokenizer=tokenizer, vocab=VOCAB + 2, context=2048, max_prefill_tokens=64) as served:
        yield served


def answer(server, path, **fields) -> dict[str, Any]:
    response = server.post({**BODY[path], **fields}, path)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        {COMPLETIONS: CompletionResponse, CHAT: ChatResponse}[path].model_validate(response.json(), strict=True)
        return response.json()
    return {}


def events(server, path, **fields) -> list[dict[str, Any]]:
    lines = server.post({**BODY[path], **fields, "stream": True}, path).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_the_list_has_the_fields_of_the_installed_client():
    for path, module in ((COMPLETIONS, completion_create_params), (CHAT, chat_create_params)):
        (listed,) = [row["fields"] for row in FIELDS if (row["api"], row["path"]) == ("OpenAI", path)]
        assert {*module.CompletionCreateParamsBase.__annotations__, "stream"} == set(listed)


@pytest.mark.parametrize("row", FIELDS, ids=lambda row: f"{row['api']} {row['path']}")
def test_each_field_is_built_or_refused_or_has_no_influence(row):
    request = REQUESTS[row["path"]]
    refused = set(request.refused)
    built = set(request.model_fields) - refused
    for name in row["fields"]:
        assert [name in built, name in refused, name in WITHOUT_INFLUENCE].count(True) == 1, name


@pytest.mark.parametrize("path", BODY)
def test_a_built_field_is_accepted_and_a_refused_one_is_not(chats, path):
    request = REQUESTS[path]
    for name in sorted({name for row in FIELDS if row["path"] == path for name in row["fields"]}):
        if name in WITHOUT_INFLUENCE:
            answer(chats, path, **{name: {"any": "value"}})
        elif name in request.refused:
            assert refusal(chats.post({**BODY[path], name: {"a": 1}}, path), 400)["param"] == name
        elif name == "logprobs":
            answer(chats, path, logprobs=2 if path == COMPLETIONS else True)
        else:
            answer(chats, path, **WITH_OTHERS.get(name, {name: VALUES.get(name)}))


@pytest.mark.parametrize(
    "row", [row for row in BODIES if row.get("path") == COMPLETIONS], ids=lambda row: row["client"]
)
def test_a_body_as_a_client_sends_it(server, row):
    response = server.post({**row["body"], "max_tokens": 4}, row["path"])
    assert response.status_code == row["status"], response.text


@pytest.mark.parametrize("name", ["typical_p", "dry_multiplier", "mirostat", "top_n_sigma", "repeat_penalty"])
def test_a_sampler_that_is_on_is_refused(server, name):
    error = refusal(server.post({"prompt": "a", name: 1.7}), 400)
    assert error["param"] == name
    assert "leave the field out" in error["message"]


def test_repeat_penalty_may_repeat_repetition_penalty(server):
    server.complete("a", repeat_penalty=1.2, repetition_penalty=1.2)
    refusal(server.post({"prompt": "a", "repeat_penalty": 1.2, "repetition_penalty": 1.1}), 400)


def test_a_stop_text_may_stay(server):
    whole = text_of(expected(b"Hello", max_tokens=40))
    stop = whole[10:13]
    start = whole.index(stop)
    fields = {"prompt": "Hello", "max_tokens": 40, "seed": 0, "stop": [stop]}
    assert answer(server, COMPLETIONS, **fields)["choices"][0]["text"] == whole[:start]
    kept = {**fields, "include_stop_str_in_output": True}
    assert answer(server, COMPLETIONS, **kept)["choices"][0]["text"] == whole[: start + len(stop)]
    assert (
        "".join(event["choices"][0]["text"] for event in events(server, COMPLETIONS, **kept))
        == (whole[: start + len(stop)])
    )


def test_the_text_of_a_stop_token_may_stay(server):
    tokens = [token.id for token in expected(b"Hello", max_tokens=8).tokens]
    fields = {"prompt": "Hello", "max_tokens": 8, "seed": 0, "stop_token_ids": [tokens[4]]}
    until = tokens.index(tokens[4])
    for kept in (False, True):
        choice = answer(server, COMPLETIONS, include_stop_str_in_output=kept, **fields)["choices"][0]
        assert choice["text"] == server.model.tokenizer.decode(tokens[: until + kept])


def test_special_tokens_have_names(chats):
    end = chats.model.tokenizer.encode("<|im_end|>")
    assert len(end) == 1
    fields = {"allowed_token_ids": end, "ignore_eos": True}
    assert answer(chats, COMPLETIONS, **fields)["choices"][0]["text"] == ""
    named = {**fields, "skip_special_tokens": False}
    assert answer(chats, COMPLETIONS, **named)["choices"][0]["text"] == "<|im_end|>" * 2
    assert answer(chats, CHAT, **named)["choices"][0]["message"]["content"] == "<|im_end|>" * 2
    echoed = answer(chats, COMPLETIONS, **named, prompt=[*end, 97], echo=True, logprobs=0)["choices"][0]
    assert echoed["text"] == f"<|im_end|>{chats.model.tokenizer.decode([97])}" + "<|im_end|>" * 2
    assert echoed["logprobs"]["text_offset"][:2] == [0, len("<|im_end|>")]


def test_token_ids_are_returned(server):
    made = [[token.id for token in expected(b"ab", max_tokens=3, seed=seed).tokens] for seed in (4, 5)]
    fields = {"max_tokens": 3, "n": 2, "seed": 4, "return_token_ids": True}
    choices = answer(server, COMPLETIONS, **fields)["choices"]
    assert [choice["token_ids"] for choice in choices] == made
    assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98]] * 2
    streamed = [event["choices"][0] for event in events(server, COMPLETIONS, **fields)]
    for index in range(2):
        parts = [part for part in streamed if part["index"] == index]
        assert sum((part["token_ids"] for part in parts), []) == made[index]
        assert [part.get("prompt_token_ids") for part in parts] == [[97, 98], *[None] * (len(parts) - 1)]
    assert "token_ids" not in answer(server, COMPLETIONS)["choices"][0]


def test_token_ids_of_a_chat(chats, folder):
    prompt = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    response = answer(chats, CHAT, return_token_ids=True, seed=1)
    assert response["prompt_token_ids"] == prompt
    assert len(response["choices"][0]["token_ids"]) == 2
    streamed = events(chats, CHAT, return_token_ids=True, seed=1)
    assert [event.get("prompt_token_ids") for event in streamed] == [prompt, *[None] * (len(streamed) - 1)]
    ids = [event["choices"][0].get("token_ids", []) for event in streamed]
    assert sum(ids, []) == response["choices"][0]["token_ids"]


def test_tokens_are_named_by_their_ids(server, chats):
    made = expected(b"ab", max_tokens=2, seed=0, logprobs=2)
    named = answer(server, COMPLETIONS, seed=0, logprobs=2, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert named["tokens"] == [f"token_id:{token.id}" for token in made.tokens]
    assert list(named["top_logprobs"][0]) == [f"token_id:{id}" for id, _ in made.tokens[0].top]
    chat = answer(chats, CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    content = chat["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == [f"token_id:{id}" for id in chat["choices"][0]["token_ids"]]


def test_the_prompt_is_scored(server):
    made = expected(b"abc", max_tokens=1, prompt_logprobs=2)
    choice = answer(server, COMPLETIONS, prompt="abc", max_tokens=1, prompt_logprobs=2)["choices"][0]
    first, *scored = choice["prompt_logprobs"]
    assert first is None
    for token, entries in zip(made.prompt, scored, strict=True):
        assert list(entries) == list(map(str, dict.fromkeys([token.id, *(id for id, _ in token.top)])))
        own = entries[str(token.id)]
        assert own["decoded_token"] == chr(token.id)
        assert (own["logprob"], own["rank"]) == (pytest.approx(token.logprob), token.rank)
        assert [entries[str(id)]["rank"] for id, _ in token.top] == [1, 2]
    # with an echo, the list of logprobs has its own number of alternatives
    fields = {"prompt": "abc", "max_tokens": 1, "prompt_logprobs": 0, "logprobs": 3, "echo": True}
    (both,) = answer(server, COMPLETIONS, **fields)["choices"]
    assert [len(entries) for entries in both["prompt_logprobs"][1:]] == [1, 1]
    assert {len(top) for top in both["logprobs"]["top_logprobs"][1:]} <= {3, 4}
    assert (
        refusal(server.post({"prompt": "abc", "prompt_logprobs": 0, "stream": True}), 400)["param"] == "prompt_logprobs"
    )


def test_the_prompt_of_a_chat_is_scored(chats):
    response = answer(chats, CHAT, prompt_logprobs=0, return_token_ids=True)
    ids = [int(id) for entries in response["prompt_logprobs"][1:] for id in entries]
    assert ids == response["prompt_token_ids"][1:]


def test_only_allowed_tokens_are_sampled(server):
    made = expected(b"ab", max_tokens=6, seed=1, allowed_token_ids=(100, 101, 102))
    assert {token.id for token in made.tokens} <= {100, 101, 102}
    fields = {"max_tokens": 6, "seed": 1, "allowed_token_ids": [100, 101, 102]}
    assert answer(server, COMPLETIONS, **fields)["choices"][0]["text"] == text_of(made)
    error = refusal(server.post({"prompt": "a", "allowed_token_ids": [VOCAB]}), 400)
    assert error["param"] == "allowed_token_ids"


def test_bad_words_are_not_written(server):
    plain = expected(b"ab", max_tokens=12).tokens
    # the third token, and a word of two tokens
    words = [chr(plain[2].id), "zz"]
    assert words[0].isascii()
    made = expected(
        b"ab", max_tokens=12, bad_words=tuple(tuple(form.encode()) for word in words for form in (word, f" {word}"))
    )
    assert [token.id for token in made.tokens] != [token.id for token in plain]
    assert answer(server, COMPLETIONS, max_tokens=12, seed=0, bad_words=words)["choices"][0]["text"] == text_of(made)


@pytest.mark.parametrize(
    ("others", "param"),
    [
        ({"min_tokens": 2, "stop_token_ids": [100]}, "allowed_token_ids"),
        ({"bad_words": ["d"]}, "allowed_token_ids"),
        ({"bad_words": ["zd"]}, "allowed_token_ids"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
    ],
    ids=["stop tokens", "a bad word", "the end of a bad word", "n-grams"],
)
def test_allowed_tokens_that_may_all_be_excluded_are_refused(server, others, param):
    """Token 0 would be sampled."""
    error = refusal(server.post({"prompt": "a", "allowed_token_ids": [100], **others}), 400)
    assert error["param"] == param


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([" "], "none of them blank"),
        (["a" * 17], "has 17 tokens; at most 16"),
        (["a"] * 129, "at most 128"),
        ([1], "texts"),
    ],
)
def test_bad_words_that_are_refused(server, words, message):
    error = refusal(server.post({"prompt": "a", "bad_words": words}), 400)
    assert error["param"] == "bad_words"
    assert message in error["message"]


# "<", "im" and "end" stand in what the template writes after a message
@pytest.mark.parametrize(
    "content",
    ["It is", "It is ", " It is", "Say", "<", "im", "end|>", "a\n", [{"type": "text", "text": "It is"}]],
    ids=str,
)
def test_the_last_message_is_continued_as_in_transformers(chats, folder, content):
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    asked = {"add_generation_prompt": False, "continue_final_message": True}
    plain = content if isinstance(content, str) else content[0]["text"]
    theirs = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        [*MESSAGES, {"role": "assistant", "content": plain}], return_dict=False, **asked
    )
    assert answer(chats, CHAT, messages=messages, return_token_ids=True, **asked)["prompt_token_ids"] == theirs
    assert chats.post({"messages": messages, **asked}, "/tokenize").json()["tokens"] == theirs


def test_a_message_that_cannot_be_continued(chats):
    both = {"messages": MESSAGES, "continue_final_message": True}
    for path in (CHAT, "/tokenize"):
        assert refusal(chats.post(both, path), 400)["param"] == "continue_final_message"
    blank = {**both, "add_generation_prompt": False, "messages": [*MESSAGES, {"role": "assistant", "content": " "}]}
    assert "has no text" in refusal(chats.post(blank, CHAT), 400)["message"]


def test_an_unknown_endpoint_names_first_what_people_want(server):
    message = refusal(server.post({}, "/v1/responses"), 404)["message"]
    wanted = ["POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models", "POST /tokenize"]
    places = [message.index(each) for each in wanted]
    assert places == sorted(places)
    assert "; it has POST /v1/chat/completions" in message
