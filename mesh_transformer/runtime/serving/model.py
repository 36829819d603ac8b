"""The model that is served, between text and tokens: prompts on their way to the loop that computes, and the choices that come of
them."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from mesh_transformer.config.describe import short
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.infer.requests import FinishReason, SamplingParams, Token
from mesh_transformer.infer.scheduler import RequestOutput
from mesh_transformer.runtime.sampling.text_stream import TextStream, token_text
from mesh_transformer.runtime.serving.loop import EngineLoop, GenerationJob
from mesh_transformer.runtime.serving.responses import invalid

T = TypeVar("T")
# stands for what JSON has not: minus infinity, and NaN, which no comparison finds larger
LEAST_LOGPROB = -9999.0


class ServedModel:
    """What the routes know of the model.

    Args:
        name: as /v1/models gives it.
        n_vocab: token ids are 0 .. n_vocab - 1.
        timeout_s: seconds that a request may take, from its body's end to its last token sent.
    """

    def __init__(self, name: str, n_vocab: int, tokenizer: Tokenizer, loop: EngineLoop, timeout_s: float):
        self.name, self.n_vocab, self.tokenizer = name, n_vocab, tokenizer
        self.loop, self.timeout_s = loop, timeout_s
        # long prompts are worked on in a thread, by a tokenizer of its own: one that encodes must not be used elsewhere
        self._encoder = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self.token_text = lru_cache(1 << 16)(lambda token: token_text(tokenizer, token))

    async def encode(self, texts: Sequence[str], param: str) -> list[list[int]]:
        """The token ids of each text; an empty one becomes the end-of-text token.

        Raises:
            ApiError: 400, as in `check`.
        """
        encoded = await self._in_thread(lambda: [self._encoder.encode(text) for text in texts])
        prompts = [ids or [self.tokenizer.eot] for ids in encoded]
        self.check(prompts, param)
        return prompts

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """The text of each prompt."""
        return await self._in_thread(lambda: [self._encoder.decode(prompt) for prompt in prompts])

    async def offsets(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """For each token of each prompt, the characters before it."""
        return await self._in_thread(lambda: [_offsets(self._encoder, prompt) for prompt in prompts])

    def check(self, prompts: Iterable[Sequence[int]], param: str) -> None:
        """Raises ApiError, 400, where a token is not in the vocabulary."""
        for prompt in prompts:
            for wrong in {min(prompt), max(prompt)}:
                if not 0 <= wrong < self.n_vocab:
                    raise invalid(
                        f"{param}: there is no token {short(wrong)}; ids are 0 to {self.n_vocab - 1}", param
                    )

    def check_room(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Raises ApiError, 400, where a prompt and its completion are longer than the context."""
        given, both, context = len(prompt), len(prompt) + max_tokens, self.loop.context
        if both > context:
            tokens = f"the prompt has {given} tokens and max_tokens is {max_tokens}: together {both}"
            raise invalid(f"{tokens}, over the context of {context} tokens", "prompt")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def end_tokens(self, others: tuple[int, ...] = (), *, ignore_eos: bool = False) -> tuple[int, ...]:
        """The tokens that end a completion: the end of a text, if the model knows it, and others."""
        if ignore_eos or self.tokenizer.eot >= self.n_vocab:
            return others
        return (self.tokenizer.eot, *(token for token in others if token != self.tokenizer.eot))


def _offsets(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    stream = TextStream(tokenizer)
    for token in prompt:
        stream.push(token)
    return stream.offsets


def sampling_params(*, spelled: Mapping[str, str] = {}, **fields: Any) -> SamplingParams:
    """`SamplingParams`, whose refusal is an answer.

    Args:
        spelled: what the request calls a field, where that is not its name here.

    Raises:
        ApiError: 400, a field is out of its range.
    """
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        name, _, reason = str(error).partition(" ")
        param = spelled.get(name, name)
        raise invalid(f"{param} {reason}", param) from error


class TokenLogprobs(NamedTuple):
    """A token as OpenAI's `logprobs` shows it."""

    text: str
    offset: int  # characters of the choice's text before it
    logprob: float | None  # nats; None for the prompt's first token, which follows nothing
    top: dict[str, float] | None  # its alternatives and itself


class Delta(NamedTuple):
    """What a step adds to a choice."""

    text: str
    tokens: Sequence[TokenLogprobs]  # empty unless logprobs were asked for
    finish_reason: FinishReason | None

    @classmethod
    def joined(cls, deltas: Sequence[Delta]) -> Delta:
        """All of a choice, of which these are the parts."""
        text = "".join(delta.text for delta in deltas)
        return cls(text, [shown for delta in deltas for shown in delta.tokens], deltas[-1].finish_reason)


class Echo(NamedTuple):
    """A prompt as its choices repeat it."""

    text: str
    offsets: Sequence[int]  # of its tokens, if they are shown


class ChoiceBuilder:
    """One completion as it grows.

    Args:
        prompt: token ids.
        stops: texts that end it; they and what follows are not part of its text.
        min_tokens: a stop that ends within so many tokens is not looked at.
        echo: what the choice's text begins with.
        logprobs: whether tokens are shown; with `echo` the prompt's too, which the engine must report then.
    """

    def __init__(
        self,
        model: ServedModel,
        prompt: Sequence[int],
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        echo: Echo | None = None,
        logprobs: bool = False,
    ):
        self.new_tokens = 0
        self._model = model
        self._stream = TextStream(model.tokenizer, stops, min_tokens=min_tokens, context=prompt)
        self._logprobs, self._begun = logprobs, False
        self._echo = echo.text if echo else ""
        self._echoed = zip(prompt, echo.offsets, strict=False) if echo else iter(())

    def take(self, output: RequestOutput) -> Delta:
        """What an output of the engine adds. After a delta with `finish_reason` there is nothing more to take."""
        text, shown = "", []
        if not self._begun:
            self._begun, text = True, self._echo
            shown += [
                TokenLogprobs(self._model.token_text(token), offset, None, None)
                for token, offset in itertools.islice(self._echoed, 1)
            ]
        for token, (_, offset) in zip(output.prompt, self._echoed, strict=False):
            shown.append(self._show(token, offset))
        for token in output.tokens:
            self.new_tokens += 1
            if output.finish_reason == "stop" and token is output.tokens[-1]:  # that one is no text
                text += self._stream.finish()
                offset = len(self._stream.text)
            else:
                text += self._stream.push(token.id)
                offset = self._stream.offsets[-1]
            if self._logprobs:
                shown.append(self._show(token, len(self._echo) + offset))
            if self._stream.stopped:
                return Delta(text, shown, "stop")
        if output.finish_reason == "length":
            text += self._stream.finish()
        return Delta(text, shown, "stop" if self._stream.stopped else output.finish_reason)

    def _show(self, token: Token, offset: int) -> TokenLogprobs:
        name = self._model.token_text(token.id)
        top = {name: max(LEAST_LOGPROB, token.logprob)}
        for other, logprob in token.top:
            if other != token.id:
                other_name = self._model.token_text(other)
                top[f"token_id:{other}" if other_name in top else other_name] = max(LEAST_LOGPROB, logprob)
        return TokenLogprobs(name, offset, top[name], top)


async def follow(job: GenerationJob, choices: Sequence[ChoiceBuilder]) -> AsyncIterator[tuple[int, Delta]]:
    """(index of the choice, what it gets) as it comes, until each is finished.

    Raises:
        ApiError: the server cannot finish them.
    """
    async for index, output in job.outputs():
        delta = choices[index].take(output)
        if delta.finish_reason and not output.finish_reason:
            job.cancel(index)
        yield index, delta
