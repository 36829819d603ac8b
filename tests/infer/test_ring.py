"""The ring buffers of layers with a window, against a cache of the whole context and against no cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import families
from support import sampling_reference as reference
from support.builders import TINY, program
from support.commands import REPO
from support.covering import covering
from support.engines import Completion, complete, engine_of, packed, prompt_of

from mesh_transformer.config import ComputeConfig, parse_config
from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.infer.requests import PromptChunk, SamplingParams
from mesh_transformer.models.model import Model
from mesh_transformer.ops.attend.cached import KVCache

# windows in all layers, from a layer on, in the second, and in the first and third
WINDOWS = {name: families.MODELS[name]["window"] for name in ("mistral", "qwen2", "gpt_neo", "gemma2")}
# rings in all layers, and in some of them
KINDS = ["mistral", "gemma2"]
SEQ, CHUNK = 64, 8
# float32 sums of the same numbers in another order
TOLERANCE = 2e-5


@functools.cache
def tiny(family: str, *overrides: str, devices: int = 1) -> Any:
    return program({**TINY, "model": families.MODELS[family]}, *(overrides or ["mesh.tp=1"]), devices=devices)


@functools.cache
def weights(family: str) -> Any:
    params = tiny(family).init(jax.random.key(3)).params
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    noisy = [leaf + 0.06 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


@functools.cache
def ring_engine(family: str) -> SlotEngine:
    return engine_of(tiny(family), weights(family), slots=2, max_prefill_tokens=CHUNK)


def stacked(family: str) -> SlotEngine:
    """Layers in a loop."""
    return ring_engine(family)


def packed_for_cpu(family: str) -> SlotEngine:
    """Layers one after the other, each with its own cache."""
    run = tiny(family)
    return engine_of(run, packed(run, weights(family)), slots=2, max_prefill_tokens=CHUNK)


def mesh(family: str) -> SlotEngine:
    """tp 2 x fsdp 2."""
    run = tiny(family, "mesh.tp=2", "mesh.fsdp=2", devices=4)
    placed = jax.device_put(weights(family), run.state_shardings.params)
    return engine_of(run, placed, slots=2, max_prefill_tokens=CHUNK)


WAYS = {one.__name__: one for one in (stacked, packed_for_cpu, mesh)}


@pytest.mark.parametrize(("family", "way"), covering(WINDOWS, WAYS, daily=(["qwen2", "gpt_neo", "gemma2"], WAYS)))
def test_generation_that_fills_the_ring_several_times(family: str, way: str) -> None:
    """A short prompt with a long completion, beside a long prompt in chunks with a short one."""
    run, params, engine = tiny(family), weights(family), WAYS[way](family)
    requests = [
        (prompt_of(1, 5), SamplingParams(max_tokens=SEQ - 5, temperature=0)),
        (prompt_of(2, 43), SamplingParams(max_tokens=SEQ - 43, seed=3, temperature=1.2)),
    ]
    assert 3 * (WINDOWS[family] + CHUNK - 1) < SEQ
    made = complete(engine, requests)
    for request, one in zip(requests, made, strict=True):
        ids, logprobs, _ = reference.complete(run, params, *request)
        assert one.ids == ids
        np.testing.assert_allclose([token.logprob for token in one.tokens], logprobs, rtol=0, atol=TOLERANCE)
    if way == "stacked":
        whole = engine_of(run, params, slots=2, max_prefill_tokens=SEQ)
        assert engine.cache_bytes < whole.cache_bytes
        assert [one.ids for one in complete(whole, requests)] == [one.ids for one in made]


def logits_in_chunks(run: Any, params: Any, cache: KVCache, tokens_BT: np.ndarray, chunk: int) -> np.ndarray:
    @jax.jit
    def step(tokens: Any, cache: Any, start: Any) -> Any:
        logits, view = run.model.apply(params, tokens, cache.view(None, SEQ), jnp.full(len(tokens_BT), start))
        return logits, view.cache

    found = []
    for start in range(0, tokens_BT.shape[1], chunk):
        logits, cache = step(tokens_BT[:, start : start + chunk], cache, start)
        found.append(logits)
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("chunk", [1, 9])
@pytest.mark.parametrize("family", KINDS)
def test_window_plus_chunk_minus_one_positions_are_needed_and_enough(family: str, chunk: int) -> None:
    run, params = tiny(family), weights(family)
    tokens = np.asarray([prompt_of(seed, 4 * 9) for seed in range(2)], np.int32)
    expected = np.asarray(run.model.apply(params, tokens)[0])
    layers, size = run.model.decoder.layers, WINDOWS[family] + chunk - 1
    differences = []
    for given in (size, size - 1):
        lengths = [SEQ if layer.attention.window is None else given for layer in layers]
        cache = KVCache.zeros(lengths, 2, [layer.attention.cache_entries for layer in layers], run.model.dtype)
        differences.append(np.abs(logits_in_chunks(run, params, cache, tokens, chunk) - expected).max())
    assert differences[0] < TOLERANCE
    assert differences[1] > 1e-3


def continued(engine: SlotEngine, slot: int, prompt: list[int], reused: int) -> Completion:
    """Greedy tokens of a prompt whose first `reused` positions come from slot 0."""
    sampling = SamplingParams(max_tokens=6, temperature=0)
    engine.insert(slot, prompt, sampling, source=0 if reused else None, reused=reused)
    made = Completion()
    for start in range(reused, len(prompt), CHUNK):
        made.add(engine.prefill([PromptChunk(slot, start, min(start + CHUNK, len(prompt)))])[0].first)
    for one in engine.generate(16)():
        made.add(one)
    engine.release(slot)
    return made


@pytest.mark.parametrize(("family", "copied"), covering(KINDS, [False, True]))
def test_a_prefix_is_reused_after_the_ring_is_full_if_its_window_is_left(family: str, copied: bool) -> None:
    engine, window, slot = ring_engine(family), WINDOWS[family], int(copied)
    prompt, sampling = prompt_of(1, 30), SamplingParams(max_tokens=11, temperature=0)
    # the last chunk is padded to position 32, and the last of the 41 tokens is not in the cache
    end, size = 40, window + CHUNK - 1
    shortest = end - size + window - 1
    for reused in (shortest, shortest + 1, end):
        (first,) = complete(engine, [(prompt, sampling)])
        sequence = prompt + first.ids
        assert [length for length in range(end + 1) if engine.holds(0, length)] == list(range(shortest, end + 1))
        following = sequence[:reused] + prompt_of(4, 5)
        found = continued(engine, slot, following, reused)
        # a third request finds what the first two left
        assert not engine.holds(slot, shortest - 1)
        expected = continued(engine, 1, following, 0)
        assert found.ids == expected.ids
        logprobs = [[token.logprob for token in made.tokens] for made in (found, expected)]
        np.testing.assert_allclose(*logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", KINDS)
def test_a_shorter_prefix_would_give_other_tokens(family: str) -> None:
    """What `holds` refuses is wrong indeed."""
    engine, prompt = ring_engine(family), prompt_of(1, 30)
    (first,) = complete(engine, [(prompt, SamplingParams(max_tokens=11, temperature=0))])
    shortest = next(length for length in range(41) if engine.holds(0, length))
    following = (prompt + first.ids)[: shortest - 1] + prompt_of(4, 5)
    found, expected = (continued(engine, 1, following, reused) for reused in (shortest - 1, 0))
    logprobs = [np.asarray([token.logprob for token in made.tokens[:1]]) for made in (found, expected)]
    assert np.abs(logprobs[0] - logprobs[1]) > 1e-4


def test_a_padded_chunk_counts_with_its_padding() -> None:
    """A chunk of one token replaces as many positions of the ring as a full one."""
    engine = ring_engine("mistral")
    prompt = prompt_of(1, 4 * CHUNK + 1)
    complete(engine, [(prompt, SamplingParams(max_tokens=1, temperature=0))])
    assert not engine.holds(0, 4 * CHUNK - 1)
    assert engine.holds(0, 4 * CHUNK)
    following = prompt[:-1] + prompt_of(4, 5)
    found, expected = (continued(engine, 1, following, reused) for reused in (4 * CHUNK, 0))
    assert found.ids == expected.ids


def test_a_call_that_nobody_read_counts() -> None:
    """The request was cancelled while the call ran: the ring has its positions."""
    engine, window = ring_engine("mistral"), WINDOWS["mistral"]
    prompt, sampling = prompt_of(1, 30), SamplingParams(max_tokens=11, temperature=0)
    engine.insert(0, prompt, sampling, source=None, reused=0)
    for start in range(0, len(prompt), CHUNK):
        engine.prefill([PromptChunk(0, start, min(start + CHUNK, len(prompt)))])
    engine.generate(8)
    engine.release(0)
    # the first token is at position 30, the last of the eight that were written at 37
    shortest = 38 - (window + CHUNK - 1) + window - 1
    assert [engine.holds(0, length) for length in (shortest - 1, shortest)] == [False, True]


# by name: the fields of a released model, and the bytes of a slot with a whole cache and with rings, for 512 tokens of
# a prompt at a time; docs/families.md has them
RELEASED: dict[str, tuple[dict[str, Any], int, int]] = {
    "Mistral-7B-v0.1": (
        {"family": "mistral", "layers": 32, "d_model": 4096, "n_heads": 32, "n_kv_heads": 8, "seq": 32768,
         "window": 4096},
        32 * 32768 * 4096,
        32 * 4607 * 4096,
    ),
    "Gemma 2 2B": (
        {"family": "gemma2", "layers": 26, "d_model": 2304, "n_heads": 8, "n_kv_heads": 4, "d_head": 256, "seq": 8192,
         "window": 4096},
        26 * 8192 * 4096,
        13 * (8192 + 4607) * 4096,
    ),
    "Gemma 2 9B": (
        {"family": "gemma2", "layers": 42, "d_model": 3584, "n_heads": 16, "n_kv_heads": 8, "d_head": 256, "seq": 8192,
         "window": 4096},
        42 * 8192 * 8192,
        21 * (8192 + 4607) * 8192,
    ),
    "GPT-Neo 2.7B": (
        {"family": "gpt_neo", "layers": 32, "d_model": 2560, "n_heads": 20, "seq": 2048, "window": 256},
        32 * 2048 * 10240,
        16 * (2048 + 767) * 10240,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_the_bytes_of_released_models(name: str) -> None:
    fields, whole, rings = RELEASED[name]
    decoder = parse_config({"model": {"n_vocab": 32000, **fields}}, []).model.decoder()
    model = Model(decoder, ComputeConfig(dtype="bfloat16", remat="none"))
    for chunk, expected in ((None, whole), (512, rings)):
        cache = jax.eval_shape(lambda chunk=chunk: model.new_cache(1, decoder.seq, longest_chunk=chunk))
        assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) == expected
    # each has its line in the documentation
    line = next(line for line in (REPO / "docs/families.md").read_text().splitlines() if line.startswith(f"| {name} |"))
    assert f"| {whole / 1e6:,.0f} MB | {rings / 1e6:,.0f} MB |" in line


@pytest.mark.parametrize("family", KINDS)
def test_the_cache_has_the_bytes_of_its_rings(family: str) -> None:
    run = tiny(family)
    (entry, _) = run.model.decoder.layers[0].attention.keys_and_values
    size = WINDOWS[family] + CHUNK - 1
    positions = sum(SEQ if layer.attention.window is None else size for layer in run.model.decoder.layers)
    bytes_of_position = 2 * entry.heads * entry.width * 4
    assert ring_engine(family).cache_bytes == 2 * positions * bytes_of_position
