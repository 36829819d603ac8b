"""Samples of the prompts of a run by its own weights, and their file samples.jsonl."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from mesh_transformer import logs
from mesh_transformer.config import Config
from mesh_transformer.data.chat.template import ChatTemplate
from mesh_transformer.data.tokens.text_stream import TextStream
from mesh_transformer.data.tokens.tokenizer import Tokenizer, load_tokenizer, warn_of_more_ids
from mesh_transformer.errors import UserError, byte_size, plural
from mesh_transformer.fields import Prompt
from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.logs import Progress, log
from mesh_transformer.parallel.sharding import Params
from mesh_transformer.runtime.sampling.sampler import MAX_SLOTS, CompletionInput, complete, end_tokens
from mesh_transformer.runtime.session import memory
from mesh_transformer.runtime.session.broadcast import from_first_process
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.training.report import MetricsReporter
from mesh_transformer.runtime.training.run_folder import SAMPLES

SECONDS = "samples/seconds"


class PromptSample(NamedTuple):
    """A prompt as text, with the text of a chat template, and its completion."""

    prompt: str
    completion: str


class EncodedPrompt(NamedTuple):
    """A prompt as text and as token IDs."""

    text: str
    tokens: list[int]


class PromptSamples:
    """Completes the prompts of logging.sample_prompts with the weights of a run. All processes take part.

    Args:
        stop: called between samples in a job of one process; returns whether the run must end.

    Raises:
        UserError: in the constructor, if the tokenizer cannot be loaded or has no chat template for messages, or if a
            prompt does not fit the model.
    """

    def __init__(self, session: Session, stop: Callable[[], bool]):
        self._session, self._stop = session, stop
        self._prompts: list[EncodedPrompt] = []
        # made by the first samples, which compile its programs
        self._engine: SlotEngine | None = None
        config = session.config
        if not config.logging.sample_prompts:
            return
        self._tokenizer = load_tokenizer(session.tokenizer)
        if jax.process_index() == 0:
            warn_of_more_ids(self._tokenizer, config.model.n_vocab)
        encoded = encode_prompts(config.logging.sample_prompts, self._tokenizer)
        # a chat template may write the time of day
        self._prompts = [EncodedPrompt(*prompt) for prompt in from_first_process(encoded)]
        check_prompts(self._prompts, config)

    def __bool__(self) -> bool:
        """Whether there are prompts."""
        return bool(self._prompts)

    @property
    def compiled(self) -> bool:
        """Whether the programs are compiled."""
        return self._engine is not None

    def due(self, step: int) -> bool:
        """Whether the prompts are sampled after `step`."""
        config = self._session.config
        every = config.logging.sample_every or config.data.val_every
        return bool(self) and (step % every == 0 or step == config.optimizer.total_steps)

    def run(self, params: Params, step: int, folder: str, report: MetricsReporter) -> bool:
        """Sample with the parameters of a run, and report the samples to the log, to `folder`/samples.jsonl and to the
        sinks of `report`. Samples that the file has for this step already are not reported again.

        Returns:
            Whether all samples were computed. If not, none is reported.
        """
        first, began = not self.compiled, time.monotonic()
        completions = self._complete(params, step)
        seconds = time.monotonic() - began
        if len(completions) < len(self._prompts):
            return False
        report.add({SECONDS: seconds})
        if jax.process_index() > 0:
            return True
        if first:
            self._log_costs(seconds)
        samples = [PromptSample(prompt.text, completions[i]) for i, prompt in enumerate(self._prompts)]
        if samples != newest(folder, step):
            append(folder, step, samples)
            for number, sample in enumerate(samples, 1):
                log.info("step %d: sample %d: %r -> %r", step, number, sample.prompt, sample.completion)
                report.text(step, f"samples/{number}", sample.prompt + sample.completion)
        return True

    def _complete(self, params: Params, step: int) -> dict[int, str]:
        """The completion of each prompt by its index. Some are missing if `stop` returns true."""
        settings, completions = self._session.config.logging, dict[int, str]()
        ends = end_tokens(self._tokenizer, self._session.config.model.n_vocab)
        options = SamplingParams(
            temperature=settings.sample_temperature, max_tokens=settings.sample_tokens, stop_token_ids=ends
        )
        inputs = {
            i: CompletionInput(prompt.tokens, options, TextStream(self._tokenizer, context=prompt.tokens))
            for i, prompt in enumerate(self._prompts)
        }
        progress = Progress(
            f"sampling after step {step}",
            len(inputs),
            unit="prompt",
            leave=False,
            quiet=jax.process_index() > 0,
        )
        engine = self._loaded_engine(self._session.whole_sequences.in_compute_dtype(params))
        for i, _, text in complete(engine, inputs):
            if jax.process_count() == 1 and self._stop():
                break
            completions[i] = text or ""
            progress.update(len(completions))
        engine.unload()
        progress.close()
        return completions

    def _loaded_engine(self, params: Params) -> SlotEngine:
        """The engine with these parameters, in the compute dtype."""
        if self._engine is None:
            log.info("compiling: samples")
            placement = self._session.whole_sequences.for_decoding()
            self._engine = SlotEngine(placement, params, slots=self._slots, context=self._context)
        else:
            self._engine.load(params)
        return self._engine

    @property
    def _slots(self) -> int:
        return min(MAX_SLOTS, len(self._prompts))

    @property
    def _context(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return max(len(prompt.tokens) for prompt in self._prompts) + self._session.config.logging.sample_tokens

    def _log_costs(self, seconds: float) -> None:
        """Log the time of the first samples, and the memory that samples need."""
        arrays = memory.serving_arrays(self._session.whole_sequences.for_decoding(), self._slots, self._context)
        parts = ", ".join(f"{name} {byte_size(n_bytes)}" for name, n_bytes in arrays.items())
        what = plural(len(self._prompts), "prompt")
        log.info("sampling %s took %.1f s with the compilation; memory on each device: %s", what, seconds, parts)


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[EncodedPrompt]:
    """The text and the tokens of each prompt.

    Raises:
        UserError: the tokenizer has no chat template for a list of messages, or the template refuses them.
    """
    encoded, source = [], tokenizer.chat_template
    if source is None and any(not isinstance(prompt, str) for prompt in prompts):
        raise UserError(
            "logging.sample_prompts has messages, and the tokenizer has no chat template: give a text instead, or set "
            "data.tokenizer to a folder with a chat template"
        )
    with contextlib.closing(ChatTemplate(source or "", tokenizer.special_names)) as template:
        for prompt in prompts:
            is_text = isinstance(prompt, str)
            text = prompt if isinstance(prompt, str) else template.render(prompt)
            # a template has written the start token
            encoded.append(EncodedPrompt(text, tokenizer.encode(text, add_special_tokens=is_text)))
    return encoded


def check_prompts(prompts: Sequence[EncodedPrompt], config: Config) -> None:
    """Check that the prompts have tokens of the model, and that they fit its context with their completions.

    Raises:
        UserError: one does not.
    """
    n_vocab, context, new = config.model.n_vocab, config.model.seq, config.logging.sample_tokens
    if new >= context:
        raise UserError(
            f"logging.sample_tokens {new} leaves no room for a prompt: it must be less than model.seq {context}"
        )
    for number, (_, tokens) in enumerate(prompts, 1):
        what = f"prompt {number} of logging.sample_prompts"
        if not tokens:
            raise UserError(f"{what} has no tokens: give it at least one")
        if max(tokens) >= n_vocab:
            raise UserError(
                f"{what} has the token {max(tokens)}, but model.n_vocab is {n_vocab}: set data.tokenizer to the "
                "tokenizer of this model"
            )
        if len(tokens) + new > context:
            raise UserError(
                f"{what} has {plural(len(tokens), 'token')}; with logging.sample_tokens {new} it exceeds model.seq "
                f"{context}: shorten it to {context - new} tokens, or lower logging.sample_tokens"
            )


def append(folder: str, step: int, samples: Sequence[PromptSample]) -> None:
    """Add a record to `folder`/samples.jsonl."""
    with contextlib.closing(logs.JsonLines(os.path.join(folder, SAMPLES))) as file:
        file.append(step, {"samples": [sample._asdict() for sample in samples]})


def newest(folder: str, step: int) -> list[PromptSample] | None:
    """The samples that were written last for `step`. None if there are none."""
    records = logs.read_json_lines(os.path.join(folder, SAMPLES), _is_samples)
    versions = [record["samples"] for record in records if record["step"] == step]
    return [PromptSample(**sample) for sample in versions[-1]] if versions else None


def cut_broken_end(folder: str) -> None:
    """Remove the incomplete record that a kill left at the end.

    Raises:
        UserError: the file is not of a run.
    """
    logs.cut_broken_end(os.path.join(folder, SAMPLES), _is_samples)


def _is_samples(value: Any) -> bool:
    """Whether `value` is a list of prompts with their completions."""
    return isinstance(value, list) and all(map(_is_sample, value))


def _is_sample(value: Any) -> bool:
    known = isinstance(value, dict) and value.keys() == set(PromptSample._fields)
    return known and all(isinstance(text, str) for text in value.values())
