"""The scheduler on the real engine: each request has the same tokens as alone, without a cached prefix."""

from typing import Any

import jax
import numpy as np
import pytest
from support import families
from support.builders import TINY, program

from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.infer.requests import SamplingParams, Token
from mesh_transformer.infer.scheduler import Scheduler

# this request is cancelled after a few tokens
CANCELLED = 5


def _requests() -> dict[int, tuple[list[int], SamplingParams]]:
    """Prompts with parts of two common prefixes, greedy or sampled, some with prompt_logprobs."""
    rng = np.random.default_rng(5)
    stems = rng.integers(0, 256, (2, 24)).tolist()
    requests = {}
    for i in range(16):
        stem = stems[rng.integers(2)][: rng.integers(12, 24)]
        prompt = stem + rng.integers(0, 256, rng.integers(1, 12)).tolist()
        new = 20 if i == CANCELLED else int(rng.integers(0, 20))
        requests[i] = (
            prompt,
            SamplingParams(max_tokens=new, temperature=float(i % 2), seed=i, prompt_logprobs=0 if i % 7 == 3 else None),
        )
    return requests


def _serve(scheduler: Scheduler, requests: dict[int, tuple[list[int], SamplingParams]]) -> dict[int, list[Token]]:
    got: dict[int, list[Token]] = {i: [] for i in requests}
    for i, request in requests.items():
        scheduler.submit(i, *request)
    while not scheduler.idle:
        for output in scheduler.step():
            got[output.request].extend(output.tokens)
        if len(requests) > 1 and len(got[CANCELLED]) > 4:
            scheduler.cancel(CANCELLED)
    return got


@pytest.mark.parametrize(
    # rings of 13 positions have forgotten most prefixes
    ("model", "reused"), [(TINY["model"], 100), (families.MODELS["gemma2"], 10)], ids=["whole", "rings"]
)  # fmt: skip
def test_requests_that_share_prefixes_get_the_tokens_they_get_alone(model: dict[str, Any], reused: int) -> None:
    """Chunked prompts between tokens of other requests, copied prefixes, reused slots, a cancelled request."""
    run = program({**TINY, "model": model}, "mesh.tp=1", "model.seq=64")
    params = run.init(jax.random.key(3)).params
    engine = SlotEngine(run.placement.for_decoding(), params, slots=3, max_prefill_tokens=8)
    requests = _requests()
    scheduler = Scheduler(engine, max_queue=16, max_steps=4)
    together = _serve(scheduler, requests)
    assert scheduler.stats.reused_tokens > reused
    for i, (prompt, sampling) in requests.items():
        alone = _serve(Scheduler(engine, max_queue=0), {i: (prompt, sampling)})[i]  # with an empty cache
        assert len(alone) == sampling.max_tokens
        cut = len(together[i])
        assert 4 < cut < 20 if i == CANCELLED else cut == sampling.max_tokens
        assert [token.id for token in together[i]] == [token.id for token in alone[:cut]]
        np.testing.assert_allclose(
            [token.logprob for token in together[i]], [token.logprob for token in alone[:cut]], atol=2e-5
        )
