"""The messages and tools of a chat: from JSON to what a chat template gets."""

import json
from collections.abc import Iterator
from typing import Any

from mesh_transformer.config.describe import short

MAX_MESSAGES, MAX_ROLE_CHARS = 10_000, 100
MAX_TOOLS, MAX_TOOL_CALLS = 1000, 1000
# of a tool or of the arguments of a call; real schemas have fewer than 20
MAX_DEPTH = 100
_ALLOWED_PARTS = 'a text, or a list of parts such as {"type": "text", "text": "..."}'
_ALLOWED_TOOL = '{"type": "function", "function": {"name": "..."}}'
# the names of ShareGPT's files and of programs that read them (axolotl, LLaMA-Factory), and the roles of templates
_SHARE_GPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "assistant": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
# roles whose messages may have no content, such as a message with a tool call alone
_MAY_BE_SILENT = ("assistant", "tool", "function")
# names of the assistant's thoughts in messages; the first is the one that most templates read
_REASONING = ("reasoning_content", "thinking", "reasoning")
# fields of a message that are not supported
_NO_FIELDS = {
    "function_call": "tool_calls replaced it",
    "audio": "only text is read",
}


def messages_of(value: Any, *, any_arguments: bool = False) -> list[dict[str, Any]]:
    """Messages for a chat template: the role, the content as one text, tool calls, and other fields that are texts.

    Args:
        any_arguments: arguments of a call that are no object become an empty one, as in vLLM. A model may have written
            them, and a refusal would end its conversation.

    Raises:
        ValueError: `value` is no list of messages; says which message is wrong.
    """
    if not isinstance(value, list) or not value:
        raise ValueError('must be a list of messages such as {"role": "user", "content": "..."}')
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"has {len(value)} messages; at most {MAX_MESSAGES} are allowed")
    return [_message(message, f"message {number}", any_arguments) for number, message in enumerate(value)]


def share_gpt_messages(value: Any) -> list[dict[str, Any]]:
    """Messages for a chat template from ShareGPT's form, {"from": "human", "value": "..."}; those with a role and a
    content are read as they are.

    Raises:
        ValueError: as in `messages_of`; or an unknown name in "from".
    """
    if not isinstance(value, list):
        return messages_of(value)
    return messages_of([_with_role(message, f"message {number}") for number, message in enumerate(value)])


def _with_role(message: Any, place: str) -> Any:
    if not isinstance(message, dict) or "role" in message or "from" not in message:
        return message
    name = message["from"]
    role = _SHARE_GPT_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ValueError(f"{place} is from {short(name)}: expected one of {', '.join(_SHARE_GPT_ROLES)}")
    return {"role": role, "content": message.get("value")}


def _message(value: Any, place: str, any_arguments: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object with role and content; got {short(value)}")
    role = value.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE_CHARS:
        raise ValueError(f"{place} must have a role, such as user or assistant; got {short(role)}")
    for name, reason in _NO_FIELDS.items():
        if value.get(name):
            raise ValueError(f"{place} has {name}, which is not supported: {reason}; leave it out")
    others = {name: other for name, other in value.items() if isinstance(other, str)}
    reasoning = next((others[name] for name in _REASONING if name in others), None)
    if reasoning is not None:
        # as transformers and vLLM: a template finds it by each of the names
        others = {"thinking": reasoning, "reasoning": reasoning, **others, "reasoning_content": reasoning}
    content = _content(value.get("content"), role, place)
    return {**others, "role": role, "content": content, **_tool_calls(value, role, place, any_arguments)}


def _content(value: Any, role: str, place: str) -> str:
    """The texts of a content, joined by line feeds, as vLLM does."""
    if isinstance(value, str):
        return value
    if value is None and role in _MAY_BE_SILENT:
        return ""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place} must have a content: {_ALLOWED_PARTS}; got {short(value)}")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            got = short(part if kind is None or kind == "text" else kind)
            raise ValueError(f"{place} has a part that is not text ({got}); the content must be {_ALLOWED_PARTS}")
    return "\n".join(part["text"] for part in value)


def _tool_calls(message: dict[str, Any], role: str, place: str, any_arguments: bool) -> dict[str, Any]:
    """{"tool_calls"} of a message, with arguments that are objects; empty if the message calls no tool."""
    calls = message.get("tool_calls")
    # some templates take an empty list for a call
    if calls is None or calls == []:
        return {}
    if role != "assistant":
        raise ValueError(
            f"{place} has tool_calls, which only a message of the assistant may have; its role is {role!r}"
        )
    if not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS:
        raise ValueError(f"{place} must have a list of at most {MAX_TOOL_CALLS} tool_calls; got {short(calls)}")
    places = [f"tool call {number} of {place}" for number in range(len(calls))]
    return {"tool_calls": [_tool_call(call, at, any_arguments) for call, at in zip(calls, places, strict=True)]}


def _tool_call(value: Any, place: str, any_arguments: bool) -> dict[str, Any]:
    function = _function(
        value, place, '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{}"}}'
    )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        if not any_arguments and function.get("arguments") is not None:
            raise ValueError(
                f"{place} must have arguments that are a JSON object or the text of one; got "
                f"{short(function['arguments'])}"
            )
        arguments = {}
    _check_depth(arguments, place)
    return {**value, "function": {**function, "arguments": arguments}}


def tools_of(value: Any) -> list[dict[str, Any]]:
    """Tools for a chat template, as they are.

    Raises:
        ValueError: `value` is no list of tools; says which tool is wrong.
    """
    if not isinstance(value, list):
        raise ValueError(f"must be a list of tools such as {_ALLOWED_TOOL}; got {short(value)}")
    if not value:
        raise ValueError("is an empty list: give at least one tool, or leave the field out")
    if len(value) > MAX_TOOLS:
        raise ValueError(f"has {len(value)} tools; at most {MAX_TOOLS} are allowed")
    for number, tool in enumerate(value):
        function = _function(tool, f"tool {number}", _ALLOWED_TOOL)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise ValueError(f"tool {number} must have parameters that are a JSON schema; got {short(parameters)}")
        _check_depth(tool, f"tool {number}")
    return value


def _function(value: Any, place: str, form: str) -> dict[str, Any]:
    """The function of a tool or of a call."""
    if isinstance(value, dict) and value.get("type", "function") != "function":
        raise ValueError(f"{place} has the type {short(value['type'])}; only tools of the type function are supported")
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ValueError(f"{place} must be an object such as {form}; got {short(value)}")
    return function


def _check_depth(value: Any, place: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return
    raise ValueError(f"{place} is nested too deeply; at most {MAX_DEPTH} levels are allowed")


def _inner(value: Any) -> Iterator[Any]:
    """The lists and objects in a list or an object."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (each for each in values if isinstance(each, dict | list))
