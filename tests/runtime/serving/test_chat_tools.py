"""Chats with tools: the bodies that clients send, and prompts against transformers' `apply_chat_template`."""

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHATML, TOOL_TEMPLATES, chat_folder
from support.served import Served, refusal, serve
from transformers import AutoTokenizer

from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.runtime.serving.fields import REFUSED

PATH, VOCAB, CONTEXT = "/v1/chat/completions", 259, 2048
# recorded by a proxy between each client and this server, with a model named tiny
BODIES = [
    row
    for row in json.loads((Path(__file__).parent / "client_bodies.json").read_text())
    if row.get("path", PATH) == PATH
]
ARGUMENTS = {"place": "Osl\u00f6 <b>", "days": 2}
TEXT = json.dumps(ARGUMENTS)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The <b>weather</b> \u00e9",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now", "description": None}}
USER = {"role": "user", "content": "Weather?"}
RESULT = {"role": "tool", "tool_call_id": "call12345", "content": "rain"}


def called(arguments: Any = TEXT) -> dict[str, Any]:
    return {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": arguments}}


# what OpenAI's API allows, and the same as transformers takes it
HISTORIES = {
    "null": ({"role": "assistant", "content": None, "tool_calls": [called()]}, {"content": ""}),
    "absent": ({"role": "assistant", "tool_calls": [called()]}, {"content": ""}),
    "text": ({"role": "assistant", "content": "I look.", "tool_calls": [called()]}, {}),
    "parts": ({"role": "assistant", "content": [{"type": "text", "text": "I"}, {"type": "text", "text": "look"}],
               "tool_calls": [called()]}, {"content": "I\nlook"}),
    "an object": ({"role": "assistant", "content": "", "tool_calls": [called(ARGUMENTS)]}, {}),
    "no arguments": ({"role": "assistant", "content": "", "tool_calls": [called("")]}, {"tool_calls": [called({})]}),
    "not JSON": ({"role": "assistant", "content": "", "tool_calls": [called('{"place": "O')]},
                 {"tool_calls": [called({})]}),
    "a list": ({"role": "assistant", "content": "", "tool_calls": [called("[1]")]}, {"tool_calls": [called({})]}),
    "no call": ({"role": "assistant", "content": "Hi", "tool_calls": [], "function_call": None, "audio": None},
                {"tool_calls": None}),
    "thoughts": ({"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [called()]}, {"content": ""}),
    "other thoughts": ({"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [called()]},
                       {"content": ""}),
}  # fmt: skip


def as_transformers_takes_it(message: dict[str, Any]) -> dict[str, Any]:
    """The message with arguments that are objects, and a content."""
    found = {"content": "", **{name: value for name, value in copy.deepcopy(message).items() if value is not None}}
    for call in found.get("tool_calls", []):
        if isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat"), TOOL_TEMPLATES["hermes"])


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    tokenizer = load_tokenizer(str(folder))
    with serve(tokenizer=tokenizer, vocab=VOCAB, context=CONTEXT, max_prefill_tokens=512) as served:
        yield served


@pytest.fixture
def prompts(server: Served, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that reach the engine."""
    seen: list[list[int]] = []
    insert = server.engine.insert
    monkeypatch.setattr(
        server.engine, "insert",
        lambda slot, prompt, *given, **how: seen.append(list(prompt)) or insert(slot, prompt, *given, **how)
    )  # fmt: skip
    return seen


@contextlib.contextmanager
def template(server: Served, source: str, tool_source: str | None = None) -> Iterator[None]:
    """The server has other chat templates."""
    template = server.model.chat_template
    assert template is not None
    before = template._source, template._tool_source
    template._source, template._tool_source, template._uses_tools = source, tool_source, None
    try:
        yield
    finally:
        template._source, template._tool_source = before
        template._uses_tools = None


def tokens(server: Served, messages: list[Any], **fields: Any) -> list[int]:
    response = server.post({"messages": messages, **fields}, "/tokenize")
    assert response.status_code == 200, response.text
    return response.json()["tokens"]


@pytest.mark.parametrize("number", range(len(BODIES)), ids=lambda number: f"{number} {BODIES[number]['client']}")
def test_a_body_as_a_client_sends_it(server: Served, theirs: Any, prompts: list[list[int]], number: int) -> None:
    """The prompt equals the prompt of transformers, or the refusal names the field that asks for what is not built."""
    body = BODIES[number]["body"]
    response = server.post(body, PATH)
    if BODIES[number]["status"] == 400:
        error = refusal(response, 400)
        assert error["param"] in ("tool_choice", "response_format")
        assert " yet" in error["message"]
        assert not prompts
        return
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n") or response.json()["choices"][0]["message"]["content"] is not None
    thinking = {"enable_thinking": True} if "reasoning_effort" in body else {}
    messages = list(map(as_transformers_takes_it, body["messages"]))
    asked = {"tools": body.get("tools"), "add_generation_prompt": True, "return_dict": False, **thinking}
    assert prompts == [theirs.apply_chat_template(messages, **asked)]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
@pytest.mark.parametrize("history", HISTORIES)
def test_a_history_with_calls_is_that_of_transformers(server: Served, theirs: Any, history: str, name: str) -> None:
    sent, other = HISTORIES[history]
    messages = [
        {"role": "system", "content": "Be short."},
        USER,
        sent,
        RESULT,
        {"role": "user", "content": "And now?"},
    ]
    known = [as_transformers_takes_it({**message, **(other if message is sent else {})}) for message in messages]
    with template(server, TOOL_TEMPLATES[name]):
        for tools in (None, [WEATHER], [WEATHER, NOW]):
            wanted = theirs.apply_chat_template(
                known, tools=tools, chat_template=TOOL_TEMPLATES[name], add_generation_prompt=True, return_dict=False
            )
            assert tokens(server, messages, tools=tools) == wanted


def test_tools_that_are_not_to_be_called_are_rendered_too(server: Served, prompts: list[list[int]]) -> None:
    """As in vLLM: the model sees the same prompt; it writes text."""
    for choice in ({}, {"tool_choice": None}, {"tool_choice": "none"}, {"tool_choice": "auto"}):
        asked = {"messages": [USER], "tools": [WEATHER], "max_tokens": 1, "parallel_tool_calls": False, **choice}
        assert server.post(asked, PATH).json()["choices"][0]["message"].keys() == {"role", "content", "refusal"}
    first, *others = prompts
    assert others == [first] * 3
    assert "weather" in server.model.tokenizer.decode(first)
    assert first == tokens(server, [USER], tools=[WEATHER]) != tokens(server, [USER])
    assert server.post({"messages": [USER], "max_tokens": 1, "tool_choice": "none"}, PATH).status_code == 200


@pytest.mark.parametrize("effort", [None, "none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_the_effort_is_a_variable_of_the_template(server: Served, prompts: list[list[int]], effort: str | None) -> None:
    """As in vLLM, it also switches thinking on or off, unless the request does so itself."""
    with template(server, "{{ reasoning_effort }}|{{ enable_thinking }}"):
        for kwargs in ({}, {"enable_thinking": 7, "reasoning_effort": "x"}):
            asked = {"messages": [USER], "reasoning_effort": effort, "chat_template_kwargs": kwargs, "max_tokens": 1}
            assert server.post(asked, PATH).status_code == 200
    found = list(map(server.model.tokenizer.decode, prompts))
    assert found == (["|", "x|7"] if effort is None else [f"{effort}|{effort != 'none'}", f"{effort}|7"])


@pytest.mark.parametrize(
    "source", [CHATML, "{% set tools = 1 %}{{ tools }}", "{# tools #}{{ 'tools' }}{{ messages[0].tools }}"]
)
def test_a_template_that_does_not_use_tools(server: Served, source: str) -> None:
    """Its own variables, and names in texts and comments, do not count."""
    with template(server, source):
        for path in (PATH, "/tokenize"):
            error = refusal(server.post({"messages": [USER], "tools": [WEATHER]}, path), 400)
            assert error["param"] == "tools"
            assert error["message"] == "the chat template of this model does not use tools: leave the field out"
        assert server.post({"messages": [USER], "max_tokens": 1}, PATH).status_code == 200


def test_a_template_with_a_fault_is_told(server: Served) -> None:
    with template(server, "{% if %}{{ tools }}"):
        error = refusal(server.post({"messages": [USER], "tools": [WEATHER]}, PATH), 400)
    assert (error["param"], "Expected an expression" in error["message"]) == ("messages", True)


def test_a_template_for_tools_beside_the_default_one(server: Served, tmp_path: Path) -> None:
    """As in transformers, which reads both from the folder."""
    config = json.loads((chat_folder(tmp_path, None) / "tokenizer_config.json").read_text())
    both = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOL_TEMPLATES["llama"]}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": both}))
    their = AutoTokenizer.from_pretrained(str(tmp_path))
    with serve(tokenizer=load_tokenizer(str(tmp_path)), vocab=VOCAB, context=CONTEXT) as served:
        for tools in (None, [WEATHER]):
            wanted = their.apply_chat_template([USER], tools=tools, add_generation_prompt=True, return_dict=False)
            assert tokens(served, [USER], tools=tools) == wanted
    with template(server, TOOL_TEMPLATES["llama"], CHATML):
        assert "does not use tools" in server.post({"messages": [USER], "tools": [WEATHER]}, "/tokenize").text


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": []}, "tools", "tools is an empty list: give at least one tool, or leave the field out"),
        ({"tools": {}}, "tools", "must be a list of tools"),
        ({"tools": [3]}, "tools", "tool 0 must be an object such as"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools", "tool 1 must be an object such as"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "tool 0 must be an object such as"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools", "the type 'custom'; only tools of"),
        ({"tools": [{"function": {"name": "a", "parameters": "x"}}]}, "tools", "that are a JSON schema; got 'x'"),
        ({"tools": [NOW] * 1001}, "tools", "1001 tools; at most 1000"),
        ({"tools": [{"function": {"name": "a", "parameters": nested(60)}}]}, "tools", "nested too deeply; at most 100"),
        ({"tool_choice": "auto"}, "tool_choice", "tool_choice 'auto' needs tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "required", "tools": [NOW]}, "tool_choice", "does not write tool calls yet; use auto or none"),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}, "tools": [NOW]}, "tool_choice", "yet"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [NOW]}, "tool_choice", "yet"),
        ({"tool_choice": 3, "tools": [NOW]}, "tool_choice", "use auto or none"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'minimal'"),
        ({"reasoning_effort": 3}, "reasoning_effort", "got 3"),
        ({"chat_template_kwargs": {"tools": [NOW]}}, "chat_template_kwargs",
         "has tools: this is a field of the request"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "has messages"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [called()]}]}, "messages", "its role is 'user'"),
        ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "messages",
         "a list of at most 1000 tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [called()] * 1001}]}, "messages", "at most 1000 tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages",
         "tool call 0 of message 0 must"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages", "the type 'custom'"),
        ({"messages": [{"role": "assistant", "tool_calls": [called(json.dumps(nested(60)))]}]}, "messages",
         "too deeply"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "a"}}]}, "messages", "tool_calls replaced it"),
        ({"messages": [{"role": "system", "content": None}]}, "messages", "must have a content"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_is_allowed(
    server: Served, fields: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(server.post({"messages": [USER], **fields}, PATH), 400)
    assert error["param"] == param
    assert words in error["message"]


def test_deep_and_long_arguments_are_no_fault_of_the_server(server: Served) -> None:
    for arguments in ("[" * 200_000, '{"a": ' + "9" * 5000 + "}", '{"a": NaN}', "\ud800", '{"a": "\\ud800"}'):
        message = {"role": "assistant", "tool_calls": [called(arguments)]}
        body = json.dumps({"messages": [USER, message], "max_tokens": 1, "tools": [WEATHER]})
        response = server.client.post(PATH, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400), arguments[:9]
    assert tokens(server, [USER])


def test_tools_need_messages(server: Served) -> None:
    error = refusal(server.post({"prompt": "a", "tools": [WEATHER]}, "/tokenize"), 400)
    assert (error["param"], "tools need messages" in error["message"]) == ("tools", True)


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_that_constrains_an_answer_is_ignored(server: Served, name: str) -> None:
    for path, asked in ((PATH, {"messages": [USER]}), ("/v1/completions", {"prompt": "a"})):
        error = refusal(server.post({**asked, "max_tokens": 1, name: {"a": 1}}, path), 400)
        assert error["param"] == name
        assert error["message"].startswith(f"{name} ")
        for neutral in (None, *REFUSED[name][1]):
            assert server.post({**asked, "max_tokens": 1, name: neutral}, path).status_code == 200


def test_a_tool_may_answer_nothing(server: Served) -> None:
    for role in ("tool", "function"):
        said = [{"role": role, "tool_call_id": "1", **content} for content in ({"content": ""}, {"content": None}, {})]
        with template(server, "{{ messages | length }}{{ messages[0].content is string }}{{ messages[0].content }}|"):
            first, *others = (tokens(server, [message]) for message in said)
        assert others == [first] * 2


def test_documents_of_a_request_reach_the_template(server: Served) -> None:
    with template(server, "{{ documents is none }}{{ (documents or [{}])[0].text }}"):
        found = [tokens(server, [USER], chat_template_kwargs=given) for given in ({}, {"documents": [{"text": "x"}]})]
    assert list(map(server.model.tokenizer.decode, found)) == ["True", "Falsex"]
