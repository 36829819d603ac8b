"""From the engine's tokens to the text, log-probabilities and end of each choice."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from mesh_transformer.infer.requests import Finish, Token
from mesh_transformer.infer.scheduler import Output
from mesh_transformer.runtime.serve.loop import Job
from mesh_transformer.runtime.serve.model import ServedModel
from mesh_transformer.runtime.text_stream import TextStream

LEAST_LOGPROB = -9999.0  # stands for what JSON has not: minus infinity, NaN


class Shown(NamedTuple):
    """A token as OpenAI's `logprobs` shows it."""

    text: str
    offset: int  # characters of the choice's text before it
    logprob: float | None  # nats; None for the prompt's first token, which follows nothing
    top: dict[str, float] | None  # its alternatives and itself


class Delta(NamedTuple):
    """What a step adds to a choice."""

    text: str
    shown: Sequence[Shown]  # empty unless logprobs were asked for
    finish: Finish | None


class Echo(NamedTuple):
    """A prompt as its choices repeat it."""

    text: str
    offsets: Sequence[int]  # of its tokens, if they are shown


class Choice:
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

    def take(self, output: Output) -> Delta:
        """What an output of the engine adds. After a delta with `finish` there is nothing more to take."""
        text, shown = "", []
        if not self._begun:
            self._begun, text = True, self._echo
            shown += [
                Shown(self._model.token_text(token), offset, None, None)
                for token, offset in itertools.islice(self._echoed, 1)
            ]
        for token, (_, offset) in zip(output.prompt, self._echoed, strict=False):
            shown.append(self._show(token, offset))
        for token in output.tokens:
            self.new_tokens += 1
            if output.finish == "stop" and token is output.tokens[-1]:  # that one is no text
                text += self._stream.finish()
                offset = len(self._stream.text)
            else:
                text += self._stream.push(token.id)
                offset = self._stream.offsets[-1]
            if self._logprobs:
                shown.append(self._show(token, len(self._echo) + offset))
            if self._stream.stopped:
                return Delta(text, shown, "stop")
        if output.finish == "length":
            text += self._stream.finish()
        return Delta(text, shown, "stop" if self._stream.stopped else output.finish)

    def _show(self, token: Token, offset: int) -> Shown:
        name = self._model.token_text(token.id)
        top = {name: _finite(token.logprob)}
        for other, logprob in token.top:
            if other != token.id:
                other_name = self._model.token_text(other)
                top[f"token_id:{other}" if other_name in top else other_name] = _finite(logprob)
        return Shown(name, offset, top[name], top)


async def follow(job: Job, choices: Sequence[Choice]) -> AsyncIterator[tuple[int, Delta]]:
    """(index of the choice, what it gets) as it comes, until each is finished.

    Raises:
        ApiError: the server cannot finish them.
    """
    async for index, output in job.outputs():
        delta = choices[index].take(output)
        if delta.finish and not output.finish:
            job.cancel(index)
        yield index, delta


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # NaN compares false
