"""Engines for tests, requests with every sampling option, and a loop that runs requests to their end."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mesh_transformer.checkpoint.load import load_by_layer
from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.tensors import UpdateCounts
from mesh_transformer.infer.cpu.packed import pack
from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.infer.requests import (
    LEAST_TEMPERATURE,
    MAX_REPETITION,
    MAX_TEMPERATURE,
    EmittedToken,
    PromptChunk,
    SamplingParams,
    Token,
)
from support.array_source import ArraySource

SLOTS = 4
GREEDY = SamplingParams(max_tokens=12, temperature=0)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.3, seed=11)
BANNED, LOVED, END = 77, 401, 5
CASES = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "cold": SamplingParams(max_tokens=12, temperature=0.2, seed=2),
    "top_k": SamplingParams(max_tokens=12, top_k=7, seed=3),
    "top_p": SamplingParams(max_tokens=12, temperature=1.5, top_p=0.6, seed=4),
    "min_p": SamplingParams(max_tokens=12, temperature=2.0, min_p=0.4, seed=5),
    "all filters": SamplingParams(max_tokens=12, temperature=2.0, min_p=0.1, top_k=20, top_p=0.8, seed=6),
    "repetition": SamplingParams(max_tokens=24, temperature=0, repetition_penalty=3.0),
    "presence": SamplingParams(max_tokens=24, temperature=0, presence_penalty=0.4),
    "frequency": SamplingParams(max_tokens=24, temperature=0, frequency_penalty=0.3),
    "negative penalties": SamplingParams(max_tokens=24, presence_penalty=-2, frequency_penalty=-1, seed=8),
    "bias": SamplingParams(max_tokens=12, temperature=0, logit_bias=((LOVED, 3.0), (BANNED, -100.0))),
    "allowed tokens": SamplingParams(
        max_tokens=12, temperature=0, allowed_token_ids=(3, 5, 8, LOVED), logit_bias=((LOVED, 3.0),)
    ),
    # of the greedy tokens 174, 60, 182, 280, 182, 182; the prompt ends with 443, which is no part of the completion
    "bad words": SamplingParams(
        max_tokens=24, temperature=0, bad_words=((443, 174), (174, 60), (280,), (182, 182, 182))
    ),
    "1-grams": SamplingParams(max_tokens=24, temperature=0, no_repeat_ngram_size=1),
    "2-grams": SamplingParams(max_tokens=24, temperature=0, no_repeat_ngram_size=2),
    "3-grams": SamplingParams(max_tokens=24, temperature=0, no_repeat_ngram_size=3),
    "stop token": SamplingParams(
        max_tokens=24, seed=9, stop_token_ids=(END,), logit_bias=((END, 5.5),), temperature=1.0
    ),
    "min_tokens": SamplingParams(
        max_tokens=24, min_tokens=9, seed=9, stop_token_ids=(BANNED, END), logit_bias=((END, 50.0),)
    ),
    "one token": SamplingParams(max_tokens=1, temperature=0),
    "no float32 temperature": SamplingParams(max_tokens=12, temperature=1e-38, seed=10),
    "least temperature": SamplingParams(max_tokens=12, temperature=LEAST_TEMPERATURE, seed=11),
    "hottest": SamplingParams(max_tokens=12, temperature=MAX_TEMPERATURE, seed=12),
    "most repetition penalty": SamplingParams(
        max_tokens=24, temperature=LEAST_TEMPERATURE, repetition_penalty=MAX_REPETITION, seed=13
    ),
    "least repetition penalty": SamplingParams(
        max_tokens=24, temperature=LEAST_TEMPERATURE, repetition_penalty=1 / MAX_REPETITION, seed=14
    ),
    "no nucleus": SamplingParams(max_tokens=12, temperature=1.5, top_p=0, seed=15),
}


def engine_of(run: Any, params: Any, slots: int = SLOTS, max_prefill_tokens: int = 512) -> SlotEngine:
    placement = run.placement.for_decoding()
    return SlotEngine(placement, params, slots=slots, max_prefill_tokens=max_prefill_tokens)


def packed(run: Any, params: Any) -> Any:
    """Parameters in the layout for decoding on a CPU, read layer by layer as from a checkpoint."""
    arrays = {name: np.asarray(leaf) for name, leaf in flatten({"params": params}).items()}
    abstract = run.placement.abstract(run.model.dtype)
    return pack(
        load_by_layer(ArraySource(arrays, UpdateCounts(0)), abstract, run.model.rows_by_layer), run.model.decoder
    )


class Completion:
    """The tokens of one slot."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.prompt: list[Token] = []
        self.finish_reason: str | None = None

    def add(self, emitted: EmittedToken | None) -> None:
        if emitted is not None:
            assert self.finish_reason is None, "a finished slot emitted a token"
            self.tokens.append(emitted.token)
            self.finish_reason = emitted.finish_reason

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def complete(
    engine: SlotEngine, requests: Sequence[tuple[list[int], SamplingParams]], steps: int = 3
) -> list[Completion]:
    """Run all requests at the same time, one per slot. Each prefill has as many chunks as max_prefill_tokens allows."""
    made = [Completion() for _ in requests]
    left: list[PromptChunk] = []
    for slot, (prompt, params) in enumerate(requests):
        engine.insert(slot, prompt, params, source=None, reused=0)
        starts = range(0, len(prompt), engine.max_prefill_tokens)
        left += [PromptChunk(slot, start, min(start + engine.max_prefill_tokens, len(prompt))) for start in starts]
    while left:
        chunks: list[PromptChunk] = []
        while left and sum(p.stop - p.start for p in [*chunks, left[0]]) <= engine.max_prefill_tokens:
            chunks.append(left.pop(0))
        for chunk, found in zip(chunks, engine.prefill(chunks), strict=True):
            made[chunk.slot].prompt += found.prompt
            made[chunk.slot].add(found.first)
    while emitted := engine.generate(steps)():
        for one in emitted:
            made[one.slot].add(one)
    for slot in range(len(requests)):
        engine.release(slot)
    return made


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 512, length).tolist()
