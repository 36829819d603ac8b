"""Prefill and decode with a cache, against the original and against the model without a cache."""

from __future__ import annotations

import functools

import golden
import jax
import numpy as np
import pytest
from builders import TINY, program

from mesh_transformer.infer.generate import Generator, bucket
from mesh_transformer.infer.sampling import SamplingOptions
from mesh_transformer.parallel.sharding import Partition, inference_rules


def _generator(run):
    return Generator(run.model, Partition(run.partition.mesh, inference_rules()))


def _keys(seeds):
    return jax.vmap(jax.random.key)(np.asarray(seeds))


def _right_padded(context: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The original pads on the left."""
    prompts = np.zeros(context.shape, np.int32)
    for row, length in enumerate(lengths):
        prompts[row, :length] = context[row, context.shape[1] - length :]
    return prompts


def _greedy(run, params, context, lengths, new):
    generator = _generator(run)
    prompts = _right_padded(context, lengths)
    n = len(prompts)
    options = SamplingOptions.same(n, 0.0, 1.0, 0)
    return jax.device_get(
        generator.generate(
            params,
            prompts,
            lengths.astype(np.int32),
            new,
            _keys(range(n)),
            options,
            -1,
            cache_length=context.shape[1],
        )
    )


def _check(generation, tokens, logits):
    new = tokens.shape[1]
    np.testing.assert_array_equal(generation.tokens_BS[:, :new], tokens)
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), tokens[..., None].astype(int), -1)[
        ..., 0
    ]
    np.testing.assert_allclose(generation.logprobs_BS[:, :new], chosen, rtol=0, atol=2e-5)


@pytest.mark.parametrize("mesh", [["mesh.tp=1"], ["mesh.tp=8"], ["mesh.fsdp=2", "mesh.tp=2"]], ids="-".join)
def test_greedy_equals_the_original_on_any_mesh(shared, mesh):
    raw = golden.config(shared / "golden/configs/tiny_mp8.json")
    run = program(raw, *mesh, devices=1 if mesh == ["mesh.tp=1"] else 8)
    params = golden.read_params(shared / "golden/mp8/ckpt_full/step_5", run.model.config)
    params = jax.device_put(params, run.state_shardings.params)
    expected = np.load(shared / "golden/mp8/f32/eval.npz")
    generation = _greedy(run, params, expected["gen/ctx"], expected["gen/ctx_length"], 16)
    _check(generation, expected["gen/greedy_top_p0/tokens"], expected["gen/greedy_top_p0/logits"])


@pytest.mark.parametrize("variant", ["rotary_layernorm", "rotary_rmsnorm-bias", "t5_layernorm"])
def test_greedy_of_the_variants_equals_the_original(shared, variant):
    run = program(golden.config(shared / f"golden/configs/variant_{variant}.json"), "mesh.tp=1")
    params = golden.read_variant(shared / "golden/variants" / variant, run.model.config)
    expected = np.load(shared / "golden/variants" / variant / "eval_f32.npz")
    generation = _greedy(run, params, expected["gen/ctx"], expected["gen/ctx_length"], 8)
    _check(generation, expected["gen/tokens"], expected["gen/logits"])


@functools.cache
def _tiny(*overrides):
    run = program(TINY, *overrides)
    return run, run.init(jax.random.key(3)).params, _generator(run)


def test_decoding_equals_the_forward_without_a_cache():
    """Also for the learned position table, which the original could not decode with."""
    run, params, generator = _tiny("model.pe=fixed", "model.norm=scalenorm-bias")
    prompts = np.random.default_rng(1).integers(0, 512, (2, 16)).astype(np.int32)
    lengths = np.array([5, 16], np.int32)
    made = generator.generate(
        params, prompts, lengths, 6, _keys([0, 1]), SamplingOptions.same(2, 0.0, 1.0, 0), -1, cache_length=32
    )
    for row, length in enumerate(lengths):
        tokens = list(prompts[row, :length])
        for step in range(6):
            logits, _ = run.model.apply(params, np.asarray([tokens], np.int32))
            assert int(np.argmax(logits[0, -1])) == made.tokens_BS[row, step]
            tokens.append(int(made.tokens_BS[row, step]))


def test_a_sequence_ends_after_the_end_of_text():
    _, params, generator = _tiny()
    prompt, length = np.full((1, 16), 7, np.int32), np.array([4], np.int32)
    options = SamplingOptions.same(1, 0.0, 1.0, 0)
    free = generator.generate(params, prompt, length, 8, _keys([0]), options, -1, cache_length=32)
    eos = int(free.tokens_BS[0, 2])
    first = list(np.asarray(free.tokens_BS[0, :8])).index(eos)
    ended = generator.generate(params, prompt, length, 8, _keys([0]), options, eos, cache_length=32)
    assert int(free.count_B[0]) == 8
    assert int(ended.count_B[0]) == first + 1
    np.testing.assert_array_equal(ended.tokens_BS[0, : first + 1], free.tokens_BS[0, : first + 1])


def test_samples_depend_on_the_seed_alone_not_on_the_batch():
    _, params, generator = _tiny()
    prompts = np.tile(np.arange(16, dtype=np.int32), (3, 1))
    lengths = np.array([9, 9, 9], np.int32)
    options = SamplingOptions.same(3, 1.0, 0.95, 50)
    made = generator.generate(params, prompts, lengths, 8, _keys([5, 6, 5]), options, -1, cache_length=32)
    np.testing.assert_array_equal(made.tokens_BS[0, :8], made.tokens_BS[2, :8])
    assert not np.array_equal(made.tokens_BS[0, :8], made.tokens_BS[1, :8])
    alone = generator.generate(
        params,
        prompts[:1],
        lengths[:1],
        8,
        _keys([6]),
        SamplingOptions.same(1, 1.0, 0.95, 50),
        -1,
        cache_length=32,
    )
    np.testing.assert_array_equal(alone.tokens_BS[0, :8], made.tokens_BS[1, :8])


def test_buckets():
    assert [bucket(n, 100) for n in (1, 16, 17, 64, 65, 100)] == [16, 16, 32, 64, 100, 100]
