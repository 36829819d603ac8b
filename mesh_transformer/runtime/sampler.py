"""Samples from a trained model: the work of device_sample.py."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence

import jax

from mesh_transformer import logs, platforms
from mesh_transformer.config import Config, ModelConfig
from mesh_transformer.data.tokenizer import Tokenizer, load_tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.infer.programs import MAX_STEPS
from mesh_transformer.infer.scheduler import Scheduler
from mesh_transformer.logs import log
from mesh_transformer.runtime.configs import config_for
from mesh_transformer.runtime.sample_request import Request
from mesh_transformer.runtime.serving_engine import open_engine
from mesh_transformer.runtime.text_stream import Drawn, TextStream
from mesh_transformer.runtime.weights import split_step

MAX_SLOTS = 16  # samples at a time; further ones wait


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion. `tokens` hold what ended it, `completion` does not. `logprobs` are of the raw distribution, before temperature and filters, in nats."""

    prompt: str | None
    completion: str | None
    tokens: list[int]
    logprobs: list[float]
    seconds: float

    def to_json(self) -> str:
        """One JSON object on one line."""
        logprobs = [value if math.isfinite(value) else None for value in self.logprobs]  # NaN is not JSON
        return json.dumps({**dataclasses.asdict(self), "logprobs": logprobs})


class Sampler:
    """An engine with a model's weights, and what schedules the samples of a request on it.

    Args:
        tokenizer: its end-of-text token ends a sample; None: samples have no text.
        prompts: all that will be asked, so that there is room for no more; None: any.
    """

    def __init__(
        self,
        config: Config,
        checkpoint: str,
        request: Request,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]] | None = None,
    ):
        self._config, self._request, self._tokenizer = config.model, request, tokenizer
        fitted = [fit(config.model, prompt, request) for prompt in prompts or ()]
        context = max((len(tokens) + new for tokens, new in fitted), default=None)
        slots = min(request.num_samples, MAX_SLOTS)
        self._engine = open_engine(config, checkpoint, slots=slots, context=context)

    def sample(self, prompt: Sequence[int], text: str | None) -> list[Sample]:
        """`num_samples` completions of a prompt's tokens; `text` is the prompt as it was given, if it was a text."""
        began = time.monotonic()
        request, tokenizer = self._request, self._tokenizer
        tokens, new = fit(self._config, prompt, request)
        if len(tokens) < len(prompt):
            cut = len(prompt) - len(tokens)
            log.warning("the prompt has %d tokens: its first %d are cut", len(prompt), cut)
        eos = tokenizer.eot if tokenizer is not None and tokenizer.eot < self._config.n_vocab else None
        scheduler = Scheduler(self._engine, max_queue=request.num_samples, max_steps=MAX_STEPS)
        drawn = []
        for i in range(request.num_samples):
            scheduler.submit(i, tokens, request.params(i, new, eos))
            stream = None if tokenizer is None else TextStream(tokenizer, request.stop, context=tokens)
            drawn.append(Drawn(stream))
        for output in scheduler.run():
            if drawn[output.request].take(output):
                scheduler.cancel(output.request)
        seconds = round(time.monotonic() - began, 3)
        return [
            Sample(text, one.text(), [t.id for t in one.tokens], [t.logprob for t in one.tokens], seconds)
            for one in drawn
        ]


def fit(config: ModelConfig, prompt: Sequence[int], request: Request) -> tuple[list[int], int]:
    """The prompt and the number of new tokens, made to fit the context.

    Raises:
        UserError: they do not, and --truncate was not given; or a token is not in the vocabulary.
    """
    c, prompt = config, list(prompt)
    if not prompt:
        raise UserError("the prompt is empty: give at least one token")
    if min(prompt) < 0 or max(prompt) >= c.n_vocab:
        raise UserError(
            f"prompt tokens must be 0 to {c.n_vocab - 1} (model.n_vocab); found {min(prompt)} to {max(prompt)}"
        )
    left = c.seq - len(prompt)
    if left < 1 and request.truncate:
        left = c.seq // 2
    new = min(256, max(1, left)) if request.max_new_tokens is None else request.max_new_tokens
    room = c.seq - new
    if new >= c.seq:
        raise UserError(f"--max-new-tokens {new} leaves no room for a prompt: the context is {c.seq} tokens")
    if len(prompt) > room and not request.truncate:
        raise UserError(
            f"the prompt has {len(prompt)} tokens; with {new} new ones that is over the context of {c.seq}: "
            f"shorten it to {room}, lower --max-new-tokens, or pass --truncate to cut it on the left"
        )
    return prompt[-room:], new


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be sampled, with everything checked that can be before weights are read."""

    config: Config
    request: Request
    tokenizer: Tokenizer | None  # None: the prompt was given as token ids, and there are no stop texts
    prompt: str | None
    tokens: list[int] | None  # of the prompt; None: prompts come from standard input

    @classmethod
    def prepare(
        cls,
        config: Config,
        request: Request,
        checkpoint: str,
        *,
        prompt: str | None = None,
        ids: list[int] | None = None,
    ) -> Job:
        """Load the tokenizer (perhaps that beside `checkpoint`), encode the prompt, see that it and the mesh fit.

        Raises:
            UserError: they do not, or there is no tokenizer.
        """
        config.mesh.shape(jax.device_count())
        tokenizer, tokens = None, ids
        if ids is None or request.stop:
            tokenizer = load_tokenizer(config.data.tokenizer, split_step(checkpoint)[0])
            tokens = tokenizer.encode(prompt) if prompt is not None else ids
        if tokens is not None:
            fit(config.model, tokens, request)
        return cls(config, request, tokenizer, prompt, tokens)

    def run(self, checkpoint: str, *, as_json: bool = False) -> None:
        """Read the weights, and answer the prompt or those of standard input.

        Raises:
            UserError: the checkpoint cannot be used.
        """
        prompts = None if self.tokens is None else [self.tokens]
        sampler = Sampler(self.config, checkpoint, self.request, self.tokenizer, prompts)
        if self.tokens is not None:
            _show(sampler.sample(self.tokens, self.prompt), as_json)
            return
        tokenizer = self.tokenizer
        assert tokenizer is not None
        for text in _interactive():
            try:
                _show(sampler.sample(tokenizer.encode(text), text), as_json)
            except UserError as error:
                log.error("%s", error)


def run(
    config_path: str | None,
    overrides: Sequence[str],
    request: Request,
    *,
    checkpoint: str | None,
    prompt: str | None,
    prompt_tokens: str | None,
    as_json: bool,
) -> int:
    """Sample as device_sample.py's arguments say: one prompt, or one a line from standard input.

    Samples go to standard output, everything else to standard error.

    Raises:
        UserError: an argument, the config, the devices, the tokenizer or the checkpoint cannot be used.
    """
    logs.set_up()
    config = config_for(config_path, overrides, checkpoint)
    source = checkpoint or config.checkpoint.root
    ids = None if prompt_tokens is None else parse_tokens(prompt_tokens)
    platforms.CompileCache()
    platforms.start_distributed()
    Job.prepare(config, request, source, prompt=prompt, ids=ids).run(source, as_json=as_json)
    return 0


def parse_tokens(text: str) -> list[int]:
    """The ids of `1,2,3`.

    Raises:
        UserError: something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(
            f"--prompt-tokens {text!r}: expected token ids separated by commas, such as 1,2,3"
        ) from error


def _interactive() -> Iterator[str]:
    """Prompts from standard input, one a line; asks for them on a terminal. Ends at the end of the input."""
    asking = sys.stdin.isatty()
    while True:
        if asking:
            sys.stderr.write("prompt> ")
            sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            return
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _show(samples: Sequence[Sample], as_json: bool) -> None:
    if jax.process_index() > 0:
        return
    for i, sample in enumerate(samples):
        if as_json:
            sys.stdout.write(sample.to_json() + "\n")
            continue
        if len(samples) > 1:
            sys.stderr.write(f"--- sample {i + 1} of {len(samples)}\n")
        if sample.completion is None:
            sys.stdout.write(",".join(str(token) for token in sample.tokens) + "\n")
        else:
            sys.stdout.write((sample.prompt or "") + sample.completion + "\n")
    sys.stdout.flush()
