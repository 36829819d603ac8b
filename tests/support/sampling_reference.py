"""A reference for sampling: a whole forward pass for each token, and the sampling steps in numpy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.infer.requests import LEAST_TEMPERATURE, SamplingParams


def complete(run: Any, params: Any, prompt: list[int], wanted: SamplingParams) -> tuple[list[int], list[float], str]:
    """The new tokens, their log-probabilities before all sampling steps, and the finish reason."""
    tokens, logprobs = list(prompt), []
    forward = _forward(run)
    for drawn in range(wanted.max_tokens):
        padded = np.zeros((1, run.config.model.seq), np.int32)
        padded[0, : len(tokens)] = tokens
        raw = np.asarray(forward(params, padded, len(tokens) - 1), np.float64)
        token = _draw(raw.astype(np.float32), tokens, drawn, wanted)
        tokens.append(token)
        logprobs.append(float(raw[token] - raw.max() - np.log(np.exp(raw - raw.max()).sum())))
        if token in wanted.stop_token_ids:
            return tokens[len(prompt) :], logprobs, "stop"
    return tokens[len(prompt) :], logprobs, "length"


@functools.cache
def _forward(run: Any) -> Any:
    return jax.jit(lambda params, tokens, at: run.model.apply(params, tokens)[0][0, at])


def _draw(logits: np.ndarray, tokens: list[int], drawn: int, w: SamplingParams) -> int:
    logits = penalised(logits, tokens, drawn, w)
    if w.temperature < LEAST_TEMPERATURE:
        return int(np.argmax(logits))
    kept = kept_tokens(logits / np.float32(w.temperature), w.top_k, w.top_p, w.min_p)
    filtered = np.full(len(logits), -np.inf, np.float32)
    filtered[sorted(kept)] = (logits / np.float32(w.temperature))[sorted(kept)]
    key = jax.random.fold_in(jax.random.key(w.seed), len(tokens))
    return int(jax.random.categorical(key, jnp.asarray(filtered)))


def penalised(logits: np.ndarray, tokens: list[int], drawn: int, w: SamplingParams) -> np.ndarray:
    """Logits after bias, penalties and exclusions, token by token."""
    logits = logits.copy()
    completion = tokens[len(tokens) - drawn :]
    for token, bias in w.logit_bias:
        logits[token] += np.float32(bias)
    if w.allowed_token_ids:
        logits[sorted(set(range(len(logits))) - set(w.allowed_token_ids))] = -np.inf
    for token in set(tokens):
        factor = np.float32(w.repetition_penalty)
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(completion):
        logits[token] -= np.float32(w.frequency_penalty) * completion.count(token)
        logits[token] -= np.float32(w.presence_penalty)
    n = w.no_repeat_ngram_size
    if n and len(tokens) >= n:
        tail = tokens[len(tokens) - n + 1 :]
        for start in range(len(tokens) - n + 1):
            if tokens[start : start + n - 1] == tail:
                logits[tokens[start + n - 1]] = -np.inf
    for *before, last in w.bad_words:
        if len(before) <= drawn and completion[drawn - len(before) :] == before:
            logits[last] = -np.inf
    if drawn < w.min_tokens:
        logits[list(w.stop_token_ids)] = -np.inf
    return logits


def kept_tokens(logits: np.ndarray, top_k: int, top_p: float, min_p: float = 0.0) -> set[int]:
    """The kept tokens: min-p, then top-k, then the smallest set of the renormalized rest with probability top_p."""
    order = np.argsort(-logits, kind="stable")
    if min_p:
        order = order[logits[order] >= logits.max() + np.log(np.float32(min_p))]
    order = order[: top_k or None]
    probability = np.exp(logits[order].astype(np.float64) - logits[order].max())
    probability /= probability.sum()
    before = np.cumsum(probability) - probability
    return {int(token) for i, token in enumerate(order) if i == 0 or before[i] < top_p}
