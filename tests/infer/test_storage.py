"""The storage of a cache on TPUs (`Tiled`, `LateView`), computed on CPU, against a reference without a cache."""

import jax
import numpy as np
import pytest
from support import families
from support import sampling_reference as reference
from support.builders import TINY, program
from support.engines import complete, engine_of, prompt_of

from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.ops.attend import storage

SEQ, CHUNK = 64, 16
MODELS = {
    "gptj": TINY["model"],
    "t5": TINY["model"] | {"pe": "t5"},
    "gemma2": families.MODELS["gemma2"],
}


@pytest.fixture(autouse=True)
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(storage._STORAGES, "cpu", storage.Tiled())


@pytest.mark.parametrize("family", MODELS)
def test_tokens(family: str) -> None:
    run = program({**TINY, "model": MODELS[family]}, "mesh.tp=1", f"model.seq={SEQ}")
    params = run.init(jax.random.key(3)).params
    engine = engine_of(run, params, slots=2, max_prefill_tokens=CHUNK)
    requests = [
        (prompt_of(1, 5), SamplingParams(max_tokens=SEQ - 5, temperature=0)),
        (prompt_of(2, 43), SamplingParams(max_tokens=SEQ - 43, seed=3, temperature=1.2)),
    ]
    made = complete(engine, requests)
    for request, one in zip(requests, made, strict=True):
        ids, logprobs, _ = reference.complete(run, params, *request)
        assert one.ids == ids
        np.testing.assert_allclose([token.logprob for token in one.tokens], logprobs, rtol=0, atol=2e-5)
