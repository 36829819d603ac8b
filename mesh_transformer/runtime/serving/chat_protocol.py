"""The JSON of chats: OpenAI's chat completions, and vLLM's requests to tokenize and detokenize."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PlainValidator, create_model

from mesh_transformer.config.describe import short
from mesh_transformer.infer.requests import MAX_TOP_LOGPROBS
from mesh_transformer.runtime.serving.chat_messages import Messages, Tools
from mesh_transformer.runtime.serving.fields import CHAT_REFUSED, REFUSED, Refusals
from mesh_transformer.runtime.serving.protocol import (
    Body,
    PromptLogprobs,
    SampledRequest,
    TokenCount,
    Usage,
    is_tokens,
    refused_fields,
)

# variables of a chat template that have a field of their own
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")


def _token_ids(value: Any) -> list[int]:
    if not is_tokens(value):
        raise ValueError("must be a list of token IDs")
    return value


def _variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f'must be a dictionary such as {{"enable_thinking": false}}; got {short(value)}')
    for name in OWN_VARIABLES:
        if name in value:
            raise ValueError(f"has {name}: this is a field of the request")
    return value


class ChatTemplateFields(Body):
    """What a chat template gets besides the messages."""

    tools: Tools = None
    add_generation_prompt: bool = True
    # end with the text of the last message
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[Any, PlainValidator(_variables, dict[str, Any])] = {}


_Refusing = create_model("_Refusing", __base__=Body, **refused_fields(CHAT_REFUSED))


class ChatRequest(SampledRequest, ChatTemplateFields, _Refusing):
    """POST /v1/chat/completions."""

    refused: ClassVar[Refusals] = {**REFUSED, **CHAT_REFUSED}

    messages: Messages
    tool_choice: Any = None
    # vLLM's values
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """The further variables of the chat template. An effort switches thinking on or off, as in vLLM."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        thinking = {"enable_thinking": self.reasoning_effort != "none"}
        return {**thinking, **self.chat_template_kwargs, "reasoning_effort": self.reasoning_effort}


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
    """One message. `token_ids` are there if the request asks for them."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    """The response of POST /v1/chat/completions. The last fields are there if the request asks for them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
