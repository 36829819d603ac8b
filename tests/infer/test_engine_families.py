"""The engine and the scorer with each family: requests, chunks, reused prefixes, packed parameters, meshes, scores.

The reference is a whole forward pass for each token. tests/families/test_against_transformers.py compares that with
transformers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from support import families
from support import sampling_reference as reference
from support.builders import TINY, program
from support.covering import covering
from support.engines import CASES, GREEDY, SAMPLED, Completion, complete, engine_of, packed, prompt_of

from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.infer.requests import PromptChunk, SamplingParams
from mesh_transformer.infer.scoring.packing import Query, plan_batches
from mesh_transformer.infer.scoring.scorer import Scorer
from mesh_transformer.ops.attend import storage
from mesh_transformer.ops.attend.storage import Looped, Scattered

# longer than every window
PROMPT = prompt_of(1, 21)


@functools.cache
def tiny(family: str) -> tuple[Any, Any, SlotEngine]:
    run = program({**TINY, "model": families.MODELS[family]}, "mesh.tp=1")
    params = jax.jit(_moved)(run.init(jax.random.key(3)).params)
    return run, params, engine_of(run, params)


def _moved(params: Any) -> Any:
    """The parameters with noise: norms are not 1 and biases not 0, and the logits not flat."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    noisy = [leaf + 0.06 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


@functools.cache
def by_definition(family: str, case: str) -> list[int]:
    run, params, _ = tiny(family)
    return reference.complete(run, params, PROMPT, CASES[case])[0]


def requests(family: str) -> None:
    """Requests with different options run together."""
    names = ("greedy", "all filters", "2-grams", "bias")
    made = complete(tiny(family)[2], [(PROMPT, CASES[name]) for name in names])
    for name, completion in zip(names, made, strict=True):
        assert completion.ids == by_definition(family, name), name


def chunks(family: str) -> None:
    """A prompt in chunks that are longer and shorter than the window."""
    run, params, whole = tiny(family)
    prompt = prompt_of(7, 50)
    (expected,) = complete(whole, [(prompt, GREEDY)])
    (found,) = complete(engine_of(run, params, slots=2, max_prefill_tokens=32), [(prompt, GREEDY)])
    assert found.ids == expected.ids


def prefix(family: str) -> None:
    """A prefix that another slot has computed."""
    _, _, engine = tiny(family)
    complete(engine, [(PROMPT, GREEDY)])
    prompt = PROMPT + prompt_of(4, 6)
    (expected,) = complete(engine, [(prompt, SAMPLED)])
    complete(engine, [(PROMPT, GREEDY)])
    engine.insert(2, prompt, SAMPLED, source=0, reused=21)
    made = Completion()
    made.add(engine.prefill([PromptChunk(2, 21, len(prompt))])[0].first)
    for one in engine.generate(16)():
        made.add(one)
    engine.release(2)
    assert made.ids == expected.ids


def packed_for_cpu(family: str) -> None:
    """Parameters in the layout for decoding on CPU."""
    run, params, _ = tiny(family)
    (found,) = complete(engine_of(run, packed(run, params), slots=1), [(PROMPT, CASES["all filters"])])
    assert found.ids == by_definition(family, "all filters")


def fixed_lengths(family: str) -> None:
    """Programs that read fixed numbers of positions, as on a GPU, and segments of the cache: a long prompt."""
    prompt = prompt_of(8, 300)
    config = {**TINY, "model": {**families.MODELS[family], "seq": 600}}
    sampling = SamplingParams(max_tokens=230, temperature=0)
    completions = []
    for stored in (Looped(), Scattered()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(storage._STORAGES, "cpu", stored)
            run = program(config, "mesh.tp=1")
            params = jax.jit(_moved)(run.init(jax.random.key(3)).params)
            engine = engine_of(run, params, slots=1, max_prefill_tokens=128)
            completions += complete(engine, [(prompt, sampling)])
        lengths = {program.length for program in engine.compiled}
        assert (lengths == {600}) == isinstance(stored, Looped)
    looped, fixed = completions
    assert looped.ids == fixed.ids
    # float32 sums in another order
    np.testing.assert_allclose(*([t.logprob for t in made.tokens] for made in completions), rtol=0, atol=5e-5)


def mesh(family: str) -> None:
    """The engine on tp 2 x fsdp 2."""
    _greedy_on(family, "mesh.tp=2", "mesh.fsdp=2")


def context_mesh(family: str) -> None:
    """The engine on cp 2 x tp 2, which split the heads together."""
    _greedy_on(family, "mesh.cp=2", "mesh.tp=2")


def _greedy_on(family: str, *axes: str) -> None:
    _, params, _ = tiny(family)
    run = program({**TINY, "model": families.MODELS[family]}, *axes, devices=4)
    placed = jax.device_put(params, run.placement.for_decoding().shardings)
    (found,) = complete(engine_of(run, placed), [(PROMPT, GREEDY)])
    assert found.ids == by_definition(family, "greedy")


def scores(family: str) -> None:
    """Queries that share a prefix in packed rows, against the log-probabilities of each alone."""
    run, params, _ = tiny(family)
    queries = [Query(PROMPT, prompt_of(seed, 3 + seed)) for seed in range(4)]
    found = {}
    for results in Scorer(run.placement, columns=512).run(params, plan_batches(queries, batch_tokens=128, width=64)):
        found |= {query: score for query, score, _ in results}
    for number, (context, continuation) in enumerate(queries):
        tokens = np.asarray([[*context, *continuation]], np.int32)
        logprobs = np.asarray(jax.nn.log_softmax(run.model.apply(params, tokens)[0]))[0]
        at = np.arange(len(context) - 1, tokens.shape[1] - 1)
        # float32 sums in another order
        np.testing.assert_allclose(found[number], logprobs[at, continuation].sum(), rtol=1e-5)


DAILY = ["gpt2", "gemma2", "bloom", "deepseek_v3", "mistral", "qwen3_moe", "gpt_neo", "jaxformer"]
BEHAVIOURS: dict[str, Callable[[str], None]] = {
    one.__name__: one for one in (requests, chunks, prefix, packed_for_cpu, fixed_lengths, mesh, context_mesh, scores)
}


@pytest.mark.parametrize(("family", "behaviour"), covering(families.MODELS, BEHAVIOURS, daily=(DAILY, BEHAVIOURS)))
def test_the_engine_with_each_family(family: str, behaviour: str) -> None:
    BEHAVIOURS[behaviour](family)
