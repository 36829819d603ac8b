"""The conversion between text and tokens: prompts for the engine's loop, and choices from its outputs."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from mesh_transformer.config.describe import short
from mesh_transformer.data.chat.template import ChatTemplate, Message, ToolsNotUsed
from mesh_transformer.data.tokens.text_stream import TextStream, token_text
from mesh_transformer.data.tokens.tokenizer import Tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.infer.requests import (
    MAX_BAD_WORD_TOKENS,
    MAX_STOP_TOKENS,
    FinishReason,
    SamplingParams,
    Token,
)
from mesh_transformer.infer.scheduler import RequestOutput
from mesh_transformer.runtime.serving.loop import EngineLoop, GenerationJob
from mesh_transformer.runtime.serving.responses import ApiError, invalid

T = TypeVar("T")
# replaces minus infinity and NaN, which JSON does not have; `max(LEAST_LOGPROB, nan)` is LEAST_LOGPROB
LEAST_LOGPROB = -9999.0


class ServedModel:
    """The model that the routes serve.

    Args:
        name: the name in /v1/models.
        n_vocab: token IDs are 0 to n_vocab - 1.
        timeout_s: the time limit of a request in seconds, from the end of its body to the sending of its last token.
        defaults: sampling options of completions and chats that do not name them, by name.
    """

    def __init__(
        self,
        name: str,
        n_vocab: int,
        tokenizer: Tokenizer,
        loop: EngineLoop,
        timeout_s: float,
        defaults: Mapping[str, Any] = {},
    ):
        self.name, self.n_vocab, self.tokenizer, self.defaults = name, n_vocab, tokenizer, defaults
        self.loop, self.timeout_s = loop, timeout_s
        # prompts are encoded in a thread, with its own copy of the tokenizer, because tokenizers are not thread-safe
        self._encoder = copy.deepcopy(tokenizer)
        self._thread, self._chat_thread = ThreadPoolExecutor(1, "tokenizer"), ThreadPoolExecutor(1, "chat template")
        source = tokenizer.chat_template
        self.chat_template = (
            None if source is None else ChatTemplate(source, tokenizer.special_names, tokenizer.tool_template)
        )
        self.token_text = lru_cache(1 << 16)(lambda token: token_text(tokenizer, token))

    async def encode(self, texts: Sequence[str], param: str, *, add_special_tokens: bool = True) -> list[list[int]]:
        """The prompt of each text. A text without tokens becomes the end-of-text token.

        Raises:
            ApiError: 400, as in `check`.
        """
        encoded = await self.tokens(texts, add_special_tokens=add_special_tokens)
        prompts = [ids or [self.tokenizer.eot] for ids in encoded]
        self.check(prompts, param)
        return prompts

    async def tokens(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The token IDs of each text, see `Tokenizer.encode`."""
        return await self.with_tokenizer(
            lambda tokenizer: [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        )

    async def decode(self, prompts: Sequence[Sequence[int]], *, special_names: bool = False) -> list[str]:
        """The text of each prompt, without special tokens or with their names."""
        return await self.with_tokenizer(
            lambda tokenizer: [tokenizer.decode(prompt, special_names=special_names) for prompt in prompts]
        )

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each text, without and with a space before it, since most tokenizers write them differently.

        Raises:
            ApiError: 400, a text has too many tokens.
        """
        texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
        encoded = await self.tokens(texts, add_special_tokens=False)
        for text, tokens in zip(texts, encoded, strict=True):
            if len(tokens) > MAX_BAD_WORD_TOKENS:
                has = f"{short(text)} has {len(tokens)} tokens"
                raise invalid(f"bad_words: {has}; at most {MAX_BAD_WORD_TOKENS} are allowed", "bad_words")
        return tuple(dict.fromkeys(map(tuple, filter(None, encoded))))

    async def render(self, messages: Sequence[Message], **how: Any) -> str:
        """The text of a chat, see `ChatTemplate.render`.

        Raises:
            ApiError: 400, the model has no chat template, or it refuses the messages or does not use the tools; or the
                last message is to be continued, and a new one to begin.
        """
        if how["add_generation_prompt"] and how["continue_final_message"]:
            reason = "continue_final_message needs add_generation_prompt false: the model continues the last message"
            raise invalid(reason, "continue_final_message")
        render = partial(self.check_chat().render, messages, **how)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._chat_thread, render)
        except UserError as error:
            raise invalid(str(error), "tools" if isinstance(error, ToolsNotUsed) else "messages") from error

    def check_chat(self) -> ChatTemplate:
        """The chat template. Raises ApiError 400 if the model has none."""
        if self.chat_template is None:
            reason = "the tokenizer of this model has no chat template"
            raise invalid(f"{reason}: send the text as `prompt` to POST /v1/completions", "messages")
        return self.chat_template

    def check_name(self, name: str) -> None:
        """Raise ApiError 404 if a request names another model."""
        if name != self.name:
            message = f"there is no model {name[:100]!r}: this server has the model {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def offsets(self, prompts: Sequence[Sequence[int]], *, special_names: bool = False) -> list[list[int]]:
        """For each token of each prompt, the number of characters before it in the text of `decode`."""
        return await self.with_tokenizer(
            lambda tokenizer: [_offsets(tokenizer, prompt, special_names=special_names) for prompt in prompts]
        )

    def check(self, prompts: Iterable[Sequence[int]], param: str) -> None:
        """Raise ApiError 400 if a token is not in the vocabulary."""
        for prompt in prompts:
            for wrong in {min(prompt), max(prompt)}:
                if not 0 <= wrong < self.n_vocab:
                    raise invalid(
                        f"{param}: there is no token {short(wrong)}; token IDs are 0 to {self.n_vocab - 1}",
                        param,
                    )

    def check_room(self, prompt: Sequence[int], max_tokens: int, param: str, *, by_default: bool = False) -> None:
        """Raise ApiError 400 if a prompt and its completion are longer than the context.

        Args:
            by_default: the request does not name max_tokens.
        """
        has, both, context = f"the prompt has {len(prompt)} tokens", len(prompt) + max_tokens, self.loop.context
        if both <= context:
            return
        if len(prompt) > context:
            reason = f"{has}, more than the context of {context} tokens: shorten it"
        elif len(prompt) == context:
            reason = f"{has} and fills the context of {context} tokens, which leaves no room for an answer: shorten it"
        else:
            most = f"max_tokens is {max_tokens}{' by default' if by_default else ''}"
            reason = f"{has} and {most}: the sum is {both}, more than the context of {context} tokens"
        raise ApiError(400, reason, param=param, code="context_length_exceeded")

    async def with_tokenizer(self, work: Callable[[Tokenizer], T]) -> T:
        """The result of `work`, which a thread computes with its own copy of the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._encoder)

    def end_tokens(self, others: tuple[int, ...] = (), *, ignore_eos: bool = False) -> tuple[int, ...]:
        """The tokens that end a completion: the end tokens of the tokenizer that the vocabulary has, and `others`.

        Raises:
            ApiError: 400, there are too many.
        """
        eos = [] if ignore_eos else [token for token in self.tokenizer.end_tokens if token < self.n_vocab]
        ends = tuple(dict.fromkeys([*eos, *others]))
        if len(ends) > MAX_STOP_TOKENS:
            allowed = f"at most {MAX_STOP_TOKENS - len(eos)} besides the {len(eos)} end tokens of this model"
            raise invalid(f"stop_token_ids has {len(others)} token IDs; {allowed} are allowed", "stop_token_ids")
        return ends

    def close(self) -> None:
        """End the thread and the process of the chat template."""
        self._chat_thread.shutdown()
        if self.chat_template is not None:
            self.chat_template.close()


def _offsets(tokenizer: Tokenizer, prompt: Sequence[int], *, special_names: bool) -> list[int]:
    stream = TextStream(tokenizer, special_names=special_names)
    for token in prompt:
        stream.push(token)
    return stream.offsets


def sampling_params(*, spelled: Mapping[str, str] = {}, **fields: Any) -> SamplingParams:
    """SamplingParams from the fields of a request.

    Args:
        spelled: the names of fields in the request, where they differ from the names in SamplingParams.

    Raises:
        ApiError: 400, a field is out of its range.
    """
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        name, _, reason = str(error).partition(" ")
        param = spelled.get(name, name)
        raise invalid(f"{param} {reason}", param) from error


class ListedToken(NamedTuple):
    """A token in a list of log-probabilities, in nats.

    Args:
        offset: the number of characters before it in the choice's text.
        logprob: None for the first token of the prompt.
        top: the most likely tokens and their log-probabilities, the most likely first.
    """

    id: int
    offset: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()


class Delta(NamedTuple):
    """The addition of one step to a choice.

    Args:
        tokens: the new tokens. Empty unless the request has `logprobs`.
        ids: the IDs of the new tokens, without those of an echo. Empty unless the request wants them.
    """

    text: str
    tokens: Sequence[ListedToken]
    finish_reason: FinishReason | None
    ids: Sequence[int] = ()

    @classmethod
    def joined(cls, deltas: Sequence[Delta]) -> Delta:
        """The whole choice, from its parts."""
        text = "".join(delta.text for delta in deltas)
        tokens = [token for delta in deltas for token in delta.tokens]
        return cls(text, tokens, deltas[-1].finish_reason, [id for delta in deltas for id in delta.ids])


class Echo(NamedTuple):
    """The text of a prompt at the start of its choices.

    Args:
        offsets: the offsets of its tokens. Empty unless the request has `logprobs`.
    """

    text: str
    offsets: Sequence[int]


class ChoiceOptions(NamedTuple):
    """What a choice has, and where it ends.

    Args:
        stops: stop texts. The choice ends with the first one.
        keep_stop: whether the stop text, or the text of a stop token, is a part of the choice.
        min_tokens: ignore a stop text that is complete within this number of tokens.
        special_names: whether special tokens have their names as texts. Else they have none.
        logprobs: how many alternatives to list with each token. None: list no tokens. With an echo the prompt's tokens
            are listed too, and the request must have `prompt_logprobs`.
        ids: whether deltas have the IDs of their tokens.
    """

    stops: Sequence[str] = ()
    keep_stop: bool = False
    min_tokens: int = 0
    special_names: bool = False
    logprobs: int | None = None
    ids: bool = False


class ChoiceBuilder:
    """Builds one choice from the outputs of its sequence.

    Args:
        prompt: token IDs.
        echo: the text at the start of the choice.
    """

    def __init__(self, model: ServedModel, prompt: Sequence[int], options: ChoiceOptions, *, echo: Echo | None = None):
        self.new_tokens = 0
        self.prompt = prompt
        # the scores of the prompt's tokens after the first one, as far as they are computed
        self.prompt_scores: list[Token] = []
        self._options = options
        self._stream = TextStream(
            model.tokenizer,
            options.stops,
            min_tokens=options.min_tokens,
            context=prompt,
            keep_stop=options.keep_stop,
            special_names=options.special_names,
        )
        self._begun = False
        self._echo = echo.text if echo else ""
        self._echoed = zip(prompt, echo.offsets, strict=False) if echo else iter(())

    def take(self, output: RequestOutput) -> Delta:
        """The addition of an output of the engine. Call it no more after a delta with `finish_reason`."""
        text, shown, ids = "", [], []
        self.prompt_scores += output.prompt
        if not self._begun:
            self._begun, text = True, self._echo
            shown += [ListedToken(token, offset, None) for token, offset in itertools.islice(self._echoed, 1)]
        for token, (_, offset) in zip(output.prompt, self._echoed, strict=False):
            shown.append(self._listed(token, offset))
        for token in output.tokens:
            self.new_tokens += 1
            if self._options.ids:
                ids.append(token.id)
            ends = output.finish_reason == "stop" and token is output.tokens[-1]
            if ends and not self._options.keep_stop:
                text += self._stream.finish()
                offset = len(self._stream.text)
            else:
                text += self._stream.push(token.id)
                offset = self._stream.offsets[-1]
            if self._options.logprobs is not None:
                shown.append(self._listed(token, len(self._echo) + offset))
            if self._stream.stopped:
                return Delta(text, shown, "stop", ids)
        if output.finish_reason is not None:
            text += self._stream.finish()
        return Delta(text, shown, "stop" if self._stream.stopped else output.finish_reason, ids)

    def _listed(self, token: Token, offset: int) -> ListedToken:
        top = [(other, max(LEAST_LOGPROB, logprob)) for other, logprob in token.top[: self._options.logprobs]]
        return ListedToken(token.id, offset, max(LEAST_LOGPROB, token.logprob), top)


async def follow(job: GenerationJob, choices: Sequence[ChoiceBuilder]) -> AsyncIterator[tuple[int, Delta]]:
    """(index of the choice, its next delta), until all choices are finished.

    Raises:
        ApiError: the server cannot finish the choices.
    """
    async for index, output in job.outputs():
        delta = choices[index].take(output)
        if delta.finish_reason and not output.finish_reason:
            job.cancel(index)
        yield index, delta
