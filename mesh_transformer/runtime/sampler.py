"""Samples from a trained model: the work of device_sample.py."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from mesh_transformer import logs, platforms
from mesh_transformer.config import ModelConfig, load_config
from mesh_transformer.data.tokenizer import Tokenizer, load_tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.infer.generate import Generator, bucket
from mesh_transformer.infer.sampling import SamplingOptions
from mesh_transformer.logs import log
from mesh_transformer.parallel.sharding import Partition, inference_rules
from mesh_transformer.runtime.session import Session
from mesh_transformer.runtime.weights import read_params, split_step


@dataclasses.dataclass(frozen=True)
class Request:
    """The command line's sampling options, checked.

    Raises:
        UserError: an option is out of its range.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    num_samples: int = 1
    seed: int = 0
    truncate: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed, fits in [
            (
                "--max-new-tokens",
                self.max_new_tokens,
                "1 or more",
                (self.max_new_tokens or 1) >= 1 and self.max_new_tokens != 0,
            ),
            ("--temperature", self.temperature, "0 (greedy) or more", 0 <= self.temperature < float("inf")),
            ("--top-p", self.top_p, "above 0, at most 1", 0 < self.top_p <= 1),
            ("--top-k", self.top_k, "0 (off) or more", self.top_k >= 0),
            ("--num-samples", self.num_samples, "1 or more", self.num_samples >= 1),
            ("--seed", self.seed, "0 to 2**32 - 1", 0 <= self.seed < 2**32),
        ]:
            if not fits:
                raise UserError(f"{name} {value}: must be {allowed}")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion. `logprobs` are of the raw distribution, before temperature and filters, in nats."""

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
    """A model with its weights on the devices, ready to generate."""

    def __init__(self, session: Session, checkpoint: str):
        self.model = session.program.model
        partition = Partition(session.program.partition.mesh, inference_rules())
        weights = read_params(session, checkpoint)
        log.info("parameters of step %d from %s", weights.step, checkpoint)
        self.params = jax.jit(self.model.cast, donate_argnums=0)(weights.params)
        self.generator = Generator(self.model, partition)

    def sample(
        self, prompt: Sequence[int], request: Request, eos: int | None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """`num_samples` completions: their new tokens (the end-of-text token included) and log-probabilities."""
        tokens, new = fit(self.model.config, prompt, request)
        n, limit = request.num_samples, self.model.config.seq
        padded = np.zeros((n, bucket(len(tokens), limit)), np.int32)
        padded[:, : len(tokens)] = tokens
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(request.seed), np.arange(n))
        generation = jax.device_get(
            self.generator.generate(
                self.params,
                padded,
                np.full((n,), len(tokens), np.int32),
                np.int32(new),
                keys,
                SamplingOptions.same(n, request.temperature, request.top_p, request.top_k),
                np.int32(-1 if eos is None else eos),
                cache_length=bucket(len(tokens) + new, limit),
            )
        )
        rows = range(n)
        counts = generation.count_B
        return (
            [generation.tokens_BS[i, : counts[i]].tolist() for i in rows],
            [generation.logprobs_BS[i, : counts[i]].tolist() for i in rows],
        )


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
    if len(prompt) > room:
        log.warning("the prompt has %d tokens: its first %d are cut", len(prompt), len(prompt) - room)
    return prompt[-room:], new


def run(
    config_path: str,
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
    config = load_config(config_path, overrides)
    ids = None if prompt_tokens is None else parse_tokens(prompt_tokens)
    logs.set_up()
    platforms.CompileCache()
    platforms.start_distributed()
    session = Session.open(config)
    source = checkpoint or config.checkpoint.root
    tokenizer = None if ids is not None else load_tokenizer(config.data.tokenizer, split_step(source)[0])
    if prompt is not None or ids is not None:  # told before the weights are read
        fit(config.model, ids if ids is not None else _encode(tokenizer, prompt or ""), request)
    sampler = Sampler(session, source)
    for text in [prompt] if prompt is not None or ids is not None else _interactive():
        tokens = ids if ids is not None else _encode(tokenizer, text or "")
        try:
            samples = list(complete(sampler, request, text, tokens, tokenizer))
        except UserError as error:
            if prompt is not None or ids is not None:
                raise
            log.error("%s", error)
            continue
        if jax.process_index() == 0:
            _show(samples, as_json)
    return 0


def complete(
    sampler: Sampler, request: Request, prompt: str | None, tokens: Sequence[int], tokenizer: Tokenizer | None
) -> Iterator[Sample]:
    """The samples of one prompt, as text too if there is a tokenizer."""
    began = time.monotonic()
    eos = tokenizer.eot if tokenizer is not None and tokenizer.eot < sampler.model.config.n_vocab else None
    completions, logprobs = sampler.sample(tokens, request, eos)
    seconds = time.monotonic() - began
    for new, chosen in zip(completions, logprobs, strict=True):
        text = None if tokenizer is None else tokenizer.decode([t for t in new if t != eos])
        yield Sample(prompt, text, new, chosen, round(seconds, 3))


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


def _encode(tokenizer: Tokenizer | None, text: str) -> list[int]:
    if tokenizer is None:
        raise AssertionError("text needs a tokenizer")
    return tokenizer.encode(text)


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
