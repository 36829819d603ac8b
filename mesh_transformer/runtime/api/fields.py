"""The arguments of a call as the body of the server's request that does the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from mesh_transformer.config.describe import short
from mesh_transformer.data.tokens.pairs import ScoredTokens, encode_pair
from mesh_transformer.data.tokens.tokenizer import Tokenizer
from mesh_transformer.errors import UserError, did_you_mean
from mesh_transformer.runtime.serving.chat_protocol import ChatRequest
from mesh_transformer.runtime.serving.protocol import MAX_SEQUENCES, CompletionRequest, SampledRequest, fault_line

Prompt = str | list[int]
Body = TypeVar("Body", bound=SampledRequest)
# fields of a request that a call does not take, and what does the same
_ELSEWHERE = {
    "prompt": "it is the first argument",
    "messages": "they are the first argument",
    "model": "a call is one of its model",
    "stream": "use model.stream",
    "stream_options": "use model.stream",
    "echo": "add the prompt to the text",
    "prompt_logprobs": "use model.score",
    "return_token_ids": "a Completion has its tokens",
    "return_tokens_as_token_ids": "a Completion has its tokens",
}


def as_prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """The prompts of a call, and whether they were given as a list of prompts.

    Args:
        prompt: a text, the IDs of its tokens, or a list of such prompts. IDs may be an array of one dimension.

    Raises:
        UserError: it is none of these.
    """
    if isinstance(prompt, str):
        return [prompt], False
    items = _as_list(prompt)
    if items and all(_is_token(item) for item in items):
        return [list(map(int, items))], False
    prompts: list[Prompt] = []
    for item in items:
        tokens = item if isinstance(item, str) else _as_list(item)
        if not isinstance(tokens, str) and not (tokens and all(map(_is_token, tokens))):
            raise UserError(f"a prompt is a text or a list of token IDs that is not empty; got {short(item)}")
        prompts.append(tokens if isinstance(tokens, str) else list(map(int, tokens)))
    return prompts, True


def _as_list(value: Any) -> list[Any]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise UserError(f"a prompt is a text, a list of token IDs, or a list of such prompts; got {short(value)}")
    return list(value)


def _is_token(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and not getattr(value, "ndim", 0)


def completion_bodies(call: str, prompts: Sequence[Prompt], fields: Mapping[str, Any]) -> Iterator[CompletionRequest]:
    """The requests for the completions of all prompts: consecutive ones of one kind share a request.

    Raises:
        TypeError: /v1/completions has no such field.
        UserError: a field has a value that is not allowed.
    """
    check_names(call, CompletionRequest, fields)
    # all fields are checked with the first request
    n = _body(CompletionRequest, {**fields, "prompt": list(prompts[:1]) or ""}).n
    for _, alike in itertools.groupby(prompts, key=type):
        rest = iter(alike)
        while part := list(itertools.islice(rest, max(1, MAX_SEQUENCES // n))):
            yield _body(CompletionRequest, {**fields, "prompt": part})


def chat_body(call: str, messages: Any, fields: Mapping[str, Any]) -> ChatRequest:
    """The request for an answer to `messages`: a list of messages, or the text of one.

    Raises:
        TypeError: /v1/chat/completions has no such field.
        UserError: a message or a field is not allowed.
    """
    check_names(call, ChatRequest, fields)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return _body(ChatRequest, {**fields, "messages": messages})


def check_names(call: str, kind: type[SampledRequest], fields: Mapping[str, Any]) -> None:
    """Raise TypeError for the first field that requests of this kind do not have."""
    known = [name for name in kind.model_fields if name not in _ELSEWHERE]
    for name in fields:
        if name not in known:
            hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else did_you_mean(name, known)
            raise TypeError(f"{call}() has no field {short(name)}{hint}")


def _body(kind: type[Body], values: Mapping[str, Any]) -> Body:
    values = dict(values)
    if isinstance(values.get("logit_bias"), Mapping):
        # keys of JSON are texts
        values["logit_bias"] = {str(token): bias for token, bias in values["logit_bias"].items()}
    try:
        return kind.model_validate({name: list(v) if isinstance(v, tuple) else v for name, v in values.items()})
    except ValidationError as error:
        faults = error.errors()
        raise UserError("; ".join(fault_line(fault, fault["loc"]) for fault in faults[:3])) from None


def texts_of(value: Any, call: str) -> list[str]:
    """The texts of an argument: a text, or a list of texts. Raises UserError if it is neither."""
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{call} takes a text, or a list of texts; got {short(value)}")
    return texts


def scored_tokens(tokenizer: Tokenizer, text: str, completion: str | None) -> ScoredTokens:
    """The tokens to score: of `completion` after `text`, or those of `text` after the first."""
    if completion is not None:
        return encode_pair(tokenizer, text, completion)
    tokens = tokenizer.encode(text, add_special_tokens=True)
    return ScoredTokens(tokens[:1], tokens[1:])
