"""The JSON of chats: OpenAI's chat completions, and vLLM's requests to tokenize and detokenize."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, create_model
from pydantic.json_schema import SkipJsonSchema

from mesh_transformer.config.describe import short
from mesh_transformer.infer.requests import MAX_TOP_LOGPROBS
from mesh_transformer.runtime.serving.protocol import Body, SampledRequest, TokenCount, Usage, is_tokens

MAX_MESSAGES, MAX_ROLE_CHARS = 10_000, 100
_ALLOWED_PARTS = 'a text, or a list of parts such as {"type": "text", "text": "..."}'
# fields of a message that this server does not have
_NO_FIELDS = ("tool_calls", "function_call", "audio")
_NO_TOOLS = "this server has no tools"
_PLAIN = "this server writes plain text"
# fields that would change the answer: the reason of the refusal, and values that ask for nothing
REFUSED: dict[str, tuple[str, list[Any]]] = {
    "tools": (_NO_TOOLS, [[]]),
    "tool_choice": (_NO_TOOLS, ["none", "auto"]),
    "functions": (_NO_TOOLS, [[]]),
    "function_call": (_NO_TOOLS, ["none", "auto"]),
    "response_format": (_PLAIN, [{"type": "text"}]),
    "structured_outputs": (_PLAIN, []),
    "guided_json": (_PLAIN, []),
    "guided_regex": (_PLAIN, []),
    "guided_choice": (_PLAIN, []),
    "guided_grammar": (_PLAIN, []),
    "modalities": (_PLAIN, [["text"]]),
    "audio": (_PLAIN, []),
    "web_search_options": ("this server does not search", []),
    "reasoning_effort": ("this server cannot limit the reasoning of a model", ["none"]),
    "verbosity": ("this server cannot choose the length of an answer; max_completion_tokens limits it", []),
    "documents": ("chat_template_kwargs can pass variables to the chat template", [[]]),
    "chat_template": ("this server uses the chat template of the model's tokenizer", []),
    "continue_final_message": ("this server begins a new message", [False]),
    "echo": ("the answer has only the new message", [False]),
}


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages for a chat template: the role, the content as one text, and other fields that are texts."""
    if not isinstance(value, list) or not value:
        raise ValueError('must be a list of messages such as {"role": "user", "content": "..."}')
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"has {len(value)} messages; at most {MAX_MESSAGES} are allowed")
    return [_message(message, f"message {number}") for number, message in enumerate(value)]


def _message(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object with role and content; got {short(value)}")
    role = value.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE_CHARS:
        raise ValueError(f"{place} must have a role, such as user or assistant; got {short(role)}")
    for name in _NO_FIELDS:
        if value.get(name):
            raise ValueError(f"{place} has {name}, which this server does not support: leave it out")
    others = {name: other for name, other in value.items() if isinstance(other, str)}
    return {**others, "role": role, "content": _content(value.get("content"), place)}


def _content(value: Any, place: str) -> str:
    """The texts of a content, joined by line feeds, as vLLM does."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place} must have a content: {_ALLOWED_PARTS}; got {short(value)}")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            got = short(part if kind is None or kind == "text" else kind)
            raise ValueError(f"{place} has a part that is not text ({got}); the content must be {_ALLOWED_PARTS}")
    return "\n".join(part["text"] for part in value)


def _token_ids(value: Any) -> list[int]:
    if not is_tokens(value):
        raise ValueError("must be a list of token IDs")
    return value


class TextPart(BaseModel):
    """A part of a content."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat. Other fields that are texts reach the chat template too."""

    role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE_CHARS)]
    content: str | Annotated[list[TextPart], Field(min_length=1)]


Messages = Annotated[
    Any, PlainValidator(_messages, Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)])
]


class ChatTemplateFields(Body):
    """What a chat template gets besides the messages."""

    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


_REFUSED_FIELDS: Any = dict.fromkeys(REFUSED, (Annotated[Any, SkipJsonSchema()], None))
_Refusing = create_model("_Refusing", __base__=Body, **_REFUSED_FIELDS)


class ChatRequest(SampledRequest, ChatTemplateFields, _Refusing):
    """POST /v1/chat/completions. It has the fields of REFUSED, so that they can be refused."""

    messages: Messages
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TokenizeRequest(ChatTemplateFields):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    # None: true for a prompt, false for messages
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class TokenizeResponse(BaseModel):
    """The response of POST /tokenize. `max_model_len` is null until the server is ready."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[Any, PlainValidator(_token_ids, list[int])]


class DetokenizeResponse(BaseModel):
    """The response of POST /detokenize."""

    prompt: str


class ListedLogprob(BaseModel):
    """A token, its log-probability in nats and its bytes in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ListedLogprob):
    """A token of a choice, with the most likely tokens at its place."""

    top_logprobs: list[ListedLogprob]


class ChatLogprobs(BaseModel):
    """The log-probabilities of a choice's tokens before all sampling steps."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    """The assistant's message."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatResponse(BaseModel):
    """The response of POST /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


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
