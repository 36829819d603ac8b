"""What the calls of a model return. No jax and no numpy: `mesh_transformer` imports it."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Completion:
    """A completion of a prompt, or an answer in a chat. `str()` of it is its text.

    Args:
        text: without a stop text.
        tokens: the IDs of the new tokens, with the stop token or the tokens of a stop text.
        logprobs: the log-probability of each new token in nats, before all sampling steps.
        top_logprobs: for each new token, the most likely tokens at its place and their log-probabilities, the most
            likely first. They are as many as the call asks for; by default none.
        finish_reason: "stop": a stop token or a stop text ended it. "length": it has `max_tokens` tokens.
        prompt_tokens: the number of tokens of the prompt.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Score:
    """How likely a text is.

    Args:
        tokens: the IDs of the scored tokens.
        logprobs: the log-probability of each of them in nats, given all tokens before it.
    """

    tokens: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        """The sum of `logprobs`."""
        return sum(self.logprobs)
