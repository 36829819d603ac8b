"""The model that is served: its name, its vocabulary and its tokenizer, before the loop that computes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

from mesh_transformer.config.describe import short
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.runtime.serve.errors import invalid
from mesh_transformer.runtime.serve.loop import EngineLoop
from mesh_transformer.runtime.text_stream import TextStream, token_text

T = TypeVar("T")


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

    def check_room(self, prompt: Sequence[int], max_tokens: int, param: str) -> None:
        """Raises ApiError, 400, where a prompt and its completion are longer than the context."""
        context = self.loop.context
        if len(prompt) + max_tokens > context:
            raise invalid(
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}: together "
                f"{len(prompt) + max_tokens}, over the context of {context} tokens",
                param,
            )

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
