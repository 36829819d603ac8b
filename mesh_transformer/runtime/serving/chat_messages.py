"""The types of a chat's messages and tools in requests."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator

from mesh_transformer.data.chat.messages import (
    MAX_MESSAGES,
    MAX_ROLE_CHARS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    messages_of,
    tools_of,
)


class TextPart(BaseModel):
    """A part of a content."""

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """The function of a call. The arguments are a JSON object, or the text of one."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A message of a chat. Other fields that are texts reach the chat template too.

    The messages of the assistant and of tools may have no content.
    """

    role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE_CHARS)]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None


class Function(BaseModel):
    """A function that the assistant may call. Other fields reach the chat template too."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool that the assistant may call."""

    type: Literal["function"] = "function"
    function: Function


Messages = Annotated[
    Any,
    PlainValidator(
        partial(messages_of, any_arguments=True), Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    ),
]
Tools = Annotated[Any, PlainValidator(tools_of, Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)])]
