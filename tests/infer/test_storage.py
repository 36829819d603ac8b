"""The cache as TPUs store it (`Tiled`) and as their steps of decoding write it (`DeferredWriteView`), computed on CPU,
against a reference in numpy and a model without a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import families
from support import sampling_reference as reference
from support.builders import TINY, program
from support.covering import covering
from support.engines import complete, engine_of, prompt_of

from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.ops.attend import cached, storage

SEQ, CHUNK = 64, 16
# keys and values; a bias of positions; rings beside whole layers, and shared keys; latents, and experts
MODELS = {
    "gptj": TINY["model"],
    "t5": TINY["model"] | {"pe": "t5"},
    "gemma2": families.MODELS["gemma2"],
    "deepseek_v2": families.MODELS["deepseek_v2"],
}
MESHES = {"one": (1, "mesh.tp=1"), "four": (4, "mesh.tp=2", "mesh.fsdp=2")}
# float32 sums of the same numbers in another order
TOLERANCE = 2e-5


@functools.cache
def tiny(family: str, mesh: str) -> tuple[Any, Any]:
    devices, *overrides = MESHES[mesh]
    run = program({**TINY, "model": MODELS[family]}, f"model.seq={SEQ}", *overrides, devices=devices)
    return run, run.init(jax.random.key(3)).params


def test_the_largest_logit_may_be_in_a_later_part() -> None:
    """By more than 88, so that the exponential of the difference overflows."""
    parts = [(jnp.full((1, 1, 2, 1), size), jnp.full((1, 1, 2, 1), size)) for size in (1.0, 300.0, 2.0)]
    mixed = cached._attend_parts(jnp.ones((1, 1, 1, 1)), parts, jnp.ones((1, 1, 1, 6), bool), None, 1.0, None)
    np.testing.assert_allclose(mixed, np.full((1, 1, 1, 1), 300.0), rtol=1e-6)


@pytest.mark.parametrize(("family", "mesh"), covering(MODELS, MESHES))
def test_tokens_equal_those_of_a_model_without_a_cache(family: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both slots first, then one of them alone: two and eight rows stand for a sequence. The second prompt takes three
    chunks."""
    monkeypatch.setitem(storage._STORAGES, "cpu", storage.Tiled())
    run, params = tiny(family, mesh)
    requests = [
        (prompt_of(1, 5), SamplingParams(max_tokens=SEQ - 5, temperature=0)),
        (prompt_of(2, 43), SamplingParams(max_tokens=SEQ - 43, seed=3, temperature=1.2)),
    ]
    made = complete(engine_of(run, params, slots=2, max_prefill_tokens=CHUNK), requests)
    whole, params = tiny(family, "one")
    for request, one in zip(requests, made, strict=True):
        ids, logprobs, _ = reference.complete(whole, params, *request)
        assert one.ids == ids
        np.testing.assert_allclose([token.logprob for token in one.tokens], logprobs, rtol=0, atol=TOLERANCE)
