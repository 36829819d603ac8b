"""The model that is served: its name, its vocabulary and its tokenizer, before the loop that computes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.runtime.serve.errors import invalid
from mesh_transformer.runtime.serve.loop import EngineLoop
from mesh_transformer.runtime.text_stream import token_text


class ServedModel:
    """What the routes know of the model.

    Args:
        name: as /v1/models gives it.
        n_vocab: token ids are 0 .. n_vocab - 1.
        timeout_s: seconds that a request may take from its first token's wait to its last token sent.
    """

    def __init__(self, name: str, n_vocab: int, tokenizer: Tokenizer, loop: EngineLoop, timeout_s: float):
        self.name, self.n_vocab, self.tokenizer, self.loop, self.timeout_s = (
            name,
            n_vocab,
            tokenizer,
            loop,
            timeout_s,
        )
        # long prompts are encoded in a thread, by a tokenizer of its own: one that encodes must not be used elsewhere
        self._encoder = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self.token_text = lru_cache(1 << 16)(lambda token: token_text(tokenizer, token))

    async def encode(self, texts: Sequence[str], param: str) -> list[list[int]]:
        """The token ids of each text; an empty one becomes the end-of-text token.

        Raises:
            ApiError: 400, as in `check`.
        """
        encoded = await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: [self._encoder.encode(text) for text in texts]
        )
        prompts = [ids or [self.tokenizer.eot] for ids in encoded]
        self.check(prompts, param)
        return prompts

    def check(self, prompts: Iterable[Sequence[int]], param: str) -> None:
        """Raises ApiError, 400, where a token is not in the vocabulary."""
        for prompt in prompts:
            for wrong in {min(prompt), max(prompt)}:
                if not 0 <= wrong < self.n_vocab:
                    raise invalid(
                        f"{param}: there is no token {wrong}; ids are 0 to {self.n_vocab - 1}", param
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

    def end_tokens(self, others: tuple[int, ...] = (), *, ignore_eos: bool = False) -> tuple[int, ...]:
        """The tokens that end a completion: the end of a text, if the model knows it, and others."""
        if ignore_eos or self.tokenizer.eot >= self.n_vocab:
            return others
        return (self.tokenizer.eot, *(token for token in others if token != self.tokenizer.eot))


def sampling_params(spelled: Mapping[str, str], **fields: object) -> SamplingParams:
    """`SamplingParams`, whose refusal is an answer.

    Args:
        spelled: what the request calls a field, where that is not its name here.

    Raises:
        ApiError: 400, a field is out of its range.
    """
    try:
        return SamplingParams(**fields)  # type: ignore[arg-type]
    except ValueError as error:
        name, _, reason = str(error).partition(" ")
        param = spelled.get(name, name)
        raise invalid(f"{param} {reason}", param) from error
