"""Sampling from a trained model: implements device_sample.py and the sampling job of a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import secrets
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer import logs, platforms
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.config import Config
from mesh_transformer.data.tokens.text_stream import TextStream
from mesh_transformer.data.tokens.tokenizer import Tokenizer
from mesh_transformer.errors import UserError, options_to_add
from mesh_transformer.infer.programs import MAX_STEPS
from mesh_transformer.infer.requests import Engine, SamplingOptions, SamplingParams, Token
from mesh_transformer.infer.scheduler import Scheduler
from mesh_transformer.logs import log
from mesh_transformer.runtime.session.engine import open_engine
from mesh_transformer.runtime.session.generation_defaults import generation_defaults
from mesh_transformer.runtime.session.tokenizer import open_tokenizer
from mesh_transformer.runtime.session.weights import config_for, of_whole_model

# samples computed at a time
MAX_SLOTS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRequest(SamplingOptions):
    """The sampling options of a prompt.

    Args:
        max_new_tokens: None: 256, or what fits in the context.
        stop: texts that end a sample. They are not part of it.
        num_samples: samples per prompt.
        seed: sample i has the seed (seed + i) mod 2**32.
        truncate: cut the beginning off a prompt that does not fit.

    Raises:
        UserError: an option is out of its range.
    """

    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    num_samples: int = 1
    seed: int = 0
    truncate: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed, fits in [
            ("max-new-tokens", self.max_new_tokens, "1 or more", 1 <= (self.max_new_tokens or 0) < 2**31),
            ("num-samples", self.num_samples, "1 or more", self.num_samples >= 1),
            ("stop", "''", "at least one character", "" not in self.stop),
            ("seed", self.seed, "0 to 2**32 - 1", 0 <= (self.seed or 0) < 2**32),
        ]:
            if value is not None and not fits:
                raise UserError(f"--{name} must be {allowed}; got {value}")
        try:
            super().__post_init__()
        except ValueError as error:
            name, _, reason = str(error).partition(" ")
            raise UserError(f"--{name.replace('_', '-')} {reason}") from error

    def params(self, number: int, max_tokens: int, ends: tuple[int, ...]) -> SamplingParams:
        """The parameters of sample `number`. Each of the tokens `ends` ends it."""
        seed = (self.seed + number) % 2**32
        return SamplingParams(**self.options, max_tokens=max_tokens, stop_token_ids=ends, seed=seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions(SampleRequest):
    """The options of device_sample.py.

    Args:
        seed: None: draw one, and log it.
        generation_config: see `generation_defaults`.
        named: the sampling options that were given.
    """

    seed: int | None = None  # type: ignore[assignment]
    checkpoint: str | None = None
    base: str | None = None
    adapter: str | None = None
    prompt: str | None = None
    prompt_tokens: str | None = None
    json: bool = False
    generation_config: str = "none"
    named: Collection[str] = ()


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion.

    Args:
        prompt: None if the prompt was given as tokens.
        completion: the text, without a stop text. None without a tokenizer.
        tokens: the new tokens, with the stop token or the tokens of a stop text.
        logprobs: the log-probability of each new token in nats, before all sampling steps.
        seconds: the time for all samples of the prompt.
    """

    prompt: str | None
    completion: str | None
    tokens: list[int]
    logprobs: list[float]
    seconds: float

    def to_json(self) -> str:
        """One JSON object on one line."""
        # JSON has no NaN and no infinity
        logprobs = [value if math.isfinite(value) else None for value in self.logprobs]
        return json.dumps({**dataclasses.asdict(self), "logprobs": logprobs})


class CompletionInput(NamedTuple):
    """The input of one completion.

    Args:
        prompt: token IDs.
        stream: decodes the new tokens. None: return no text.
    """

    prompt: Sequence[int]
    params: SamplingParams
    stream: TextStream | None


def complete(engine: Engine, inputs: Mapping[int, CompletionInput]) -> Iterator[tuple[int, list[Token], str | None]]:
    """Compute completions, and return each one when it is finished: its key, its tokens and its text.

    The tokens include the stop token or the tokens of a stop text. The text does not.
    """
    scheduler = Scheduler(engine, max_queue=len(inputs), max_steps=MAX_STEPS)
    for key, one in inputs.items():
        scheduler.submit(key, one.prompt, one.params)
    drawn: dict[int, list[Token]] = {key: [] for key in inputs}
    for output in scheduler.run():
        key, stream = output.request, inputs[output.request].stream
        for token in output.tokens:
            drawn[key].append(token)
            if stream is not None and not (output.finish_reason == "stop" and token is output.tokens[-1]):
                stream.push(token.id)
                if stream.stopped:
                    scheduler.cancel(key)
                    break
        if output.finish_reason or (stream is not None and stream.stopped):
            yield key, drawn[key], None if stream is None else stream.text + stream.finish()


def end_tokens(tokenizer: Tokenizer, n_vocab: int) -> tuple[int, ...]:
    """The tokens that end a completion and that a model with `n_vocab` tokens has."""
    return tuple(token for token in tokenizer.end_tokens if token < n_vocab)


class _Prompt(NamedTuple):
    """A prompt that fits the context together with its new tokens.

    Args:
        text: None if the prompt was given as tokens.
        new: the largest number of new tokens.
    """

    text: str | None
    tokens: list[int]
    new: int


class Sampler:
    """Samples completions of prompts. The constructor makes all checks that need no weights.

    Args:
        checkpoint: it may have the tokenizer.
        prompts: texts, or lists of token IDs. None: read prompts from standard input, one per line.

    Raises:
        UserError: the devices do not fit the mesh, a prompt does not fit the model, standard input has no prompt, or
            there is no tokenizer.
    """

    def __init__(
        self,
        config: Config,
        request: SampleRequest,
        checkpoint: Checkpoint,
        prompts: Sequence[str | list[int]] | None,
    ):
        config.mesh.shape(jax.device_count())
        self._config, self._request = config, request
        # without a tokenizer, samples have no text
        self._tokenizer: Tokenizer | None = None
        if prompts is None or request.stop or any(isinstance(prompt, str) for prompt in prompts):
            self._tokenizer = open_tokenizer(config, checkpoint)
        self._prompts = None if prompts is None else list(map(self._fit, prompts))
        self._lines = _lines() if prompts is None else iter(())
        # the wait for a person is after the weights are loaded; other input begins before, because it may have no
        # prompt
        if prompts is None and not sys.stdin.isatty():
            self._lines = itertools.chain(list(itertools.islice(self._lines, 1)), self._lines)

    def samples(self, checkpoint: Checkpoint) -> Iterator[list[Sample]]:
        """Load the weights, and return the `num_samples` samples of each prompt.

        Raises:
            UserError: the checkpoint cannot be used.
        """
        prompts = self._prompts
        context = max(len(one.tokens) + one.new for one in prompts) if prompts else None
        slots = min(self._request.num_samples, MAX_SLOTS)
        engine = open_engine(self._config, checkpoint, slots=slots, context=context)
        if prompts is not None:
            log.info("compiling and sampling")
        for prompt in self._prompts_from_stdin() if prompts is None else prompts:
            yield self._sample(engine, prompt)

    def show(self, checkpoint: Checkpoint, *, as_json: bool = False) -> None:
        """Print the samples to standard output."""
        for samples in self.samples(checkpoint):
            _show(samples, as_json)

    def _sample(self, engine: Engine, prompt: _Prompt) -> list[Sample]:
        began = time.monotonic()
        request, tokenizer = self._request, self._tokenizer
        ends = () if tokenizer is None else end_tokens(tokenizer, self._config.model.n_vocab)
        inputs = {}
        for number in range(request.num_samples):
            stream = None if tokenizer is None else TextStream(tokenizer, request.stop, context=prompt.tokens)
            inputs[number] = CompletionInput(prompt.tokens, request.params(number, prompt.new, ends), stream)
        done = sorted(complete(engine, inputs))
        seconds = round(time.monotonic() - began, 3)
        return [
            Sample(prompt.text, text, [t.id for t in tokens], [t.logprob for t in tokens], seconds)
            for _, tokens, text in done
        ]

    def _prompts_from_stdin(self) -> Iterator[_Prompt]:
        """Prompts from standard input. A line that does not fit the context is logged as an error and skipped."""
        for line in self._lines:
            try:
                yield self._fit(line)
            except UserError as error:
                log.error("%s", error)

    def _fit(self, given: str | list[int]) -> _Prompt:
        """The tokens of a prompt and the number of new tokens, so that both fit the context.

        Raises:
            UserError: they do not fit and --truncate is not given, or a token is not in the vocabulary.
        """
        c, request, prompt, text = self._config.model, self._request, given, None
        if isinstance(prompt, str):
            tokenizer = self._tokenizer
            assert tokenizer is not None
            text, prompt = prompt, tokenizer.encode(prompt, add_special_tokens=True)
        if not prompt:
            raise UserError("the prompt is empty: give at least one token")
        wrong = next((token for token in prompt if not 0 <= token < c.n_vocab), None)
        if wrong is not None:
            raise UserError(
                f"the prompt has the token {wrong}, but model.n_vocab is {c.n_vocab}: "
                + (f"give token IDs of 0 to {c.n_vocab - 1}" if text is None else "set data.tokenizer to the model's")
            )
        left = c.seq - len(prompt)
        if left < 1 and request.truncate:
            left = c.seq // 2
        new = min(256, max(1, left)) if request.max_new_tokens is None else request.max_new_tokens
        room = c.seq - new
        if new >= c.seq:
            raise UserError(
                f"--max-new-tokens {new} leaves no room for a prompt: it must be below the context of {c.seq} tokens"
            )
        if len(prompt) > room and not request.truncate:
            raise UserError(
                f"the prompt has {len(prompt)} tokens; with {new} new tokens it exceeds the context of {c.seq}: "
                f"shorten it to {room} tokens, lower --max-new-tokens, or pass {options_to_add('--truncate')} to cut "
                "off its beginning"
            )
        if len(prompt) > room:
            log.warning("the prompt has %d tokens: the first %d are cut off", len(prompt), len(prompt) - room)
        return _Prompt(text, prompt[-room:], new)


def run(config_path: str | None, overrides: Sequence[str], options: SampleOptions) -> int:
    """Run device_sample.py: sample one prompt, or the prompts from standard input, one per line.

    Samples are printed to standard output, log lines to standard error.

    Raises:
        UserError: an argument, the config, the devices, the tokenizer or the checkpoint cannot be used.
    """
    logs.set_up()
    config, checkpoint = config_for(config_path, overrides, options.checkpoint, options.base, options.adapter)
    prompts: list[str | list[int]] | None = None if options.prompt is None else [options.prompt]
    if options.prompt_tokens is not None:
        prompts = [parse_tokens(options.prompt_tokens)]
    defaults = generation_defaults(checkpoint, options.generation_config)
    others = {name: value for name, value in defaults.items() if name not in options.named}
    options = dataclasses.replace(options, **others)
    platforms.CompileCache()
    platforms.start_devices()
    Sampler(config, _with_seed(options), checkpoint, prompts).show(checkpoint, as_json=options.json)
    return 0


def _with_seed(options: SampleOptions) -> SampleOptions:
    """The options with a seed, the same in all processes."""
    if options.seed is not None:
        return options
    # an int32 is broadcast without a loss in any configuration of JAX
    seed = int(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbelow(2**31))))
    if options.temperature and jax.process_index() == 0:
        log.info("seed %d: %s gives the same samples again", seed, options_to_add("--seed", str(seed)))
    return dataclasses.replace(options, seed=seed)


def sample_prompts(
    config: Config, request: SampleRequest, checkpoint: str, prompts: Sequence[str | list[int]]
) -> list[list[Sample]]:
    """The samples of each prompt. Joins the other processes first, if the environment defines any.

    Args:
        prompts: texts, or lists of token IDs.

    Raises:
        UserError: an argument, the config, the devices, the tokenizer or the checkpoint cannot be used.
    """
    platforms.CompileCache()
    platforms.start_devices()
    opened = Checkpoint.open(checkpoint)
    return list(Sampler(of_whole_model(config), request, opened, prompts).samples(opened))


def parse_tokens(text: str) -> list[int]:
    """Parse token IDs such as `1,2,3`.

    Raises:
        UserError: `text` has another form.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--prompt-tokens {text!r}: expected token IDs separated by commas, such as 1,2,3") from error


def _lines() -> Iterator[str]:
    """The nonempty lines of standard input. On a terminal, it asks for each one, and Ctrl-C ends the input.

    Raises:
        UserError: there is no line, and standard input is no terminal.
    """
    asking, found = sys.stdin.isatty(), False
    if asking:
        sys.stderr.write("one prompt per line; Ctrl-D ends\n")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if asking:
                sys.stderr.write("prompt> ")
                sys.stderr.flush()
            line = sys.stdin.readline()
            if not line and not (asking or found):
                raise UserError(
                    "no prompt was given: add --prompt TEXT, or write one prompt per line to standard input"
                )
            if not line:
                sys.stderr.write("\n" * asking)
                return
            if line.strip():
                found = True
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
