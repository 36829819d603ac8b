"""What every family promises, whatever its numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import families
from support.builders import TINY, program
from support.covering import covering

from mesh_transformer.errors import UserError
from mesh_transformer.estimate.hlo import collectives
from mesh_transformer.families import FAMILIES, gptj
from mesh_transformer.parallel.sharding import collect_axes, map_axes, use, with_axes
from mesh_transformer.sequences import Sequences
from mesh_transformer.spec import layer_groups_of, starts
from mesh_transformer.train.step import TrainProgram

TOKENS = np.random.default_rng(0).integers(0, 512, (1, 8, 41)).astype(np.int32)
NORMS = ["layernorm", "layernorm-nobias", "rmsnorm", "rmsnorm-bias", "scalenorm", "scalenorm-bias"]
ENCODINGS = ["rotary", "fixed", "t5"]


def lines_of_a_step(run: TrainProgram) -> int:
    """The lines of the program of a training step."""
    tokens = jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32)
    return run.train_step.lower(run.abstract_state, tokens).as_text().count("\n")


def lines_of_decoding(run: TrainProgram, groups: int) -> int:
    """The lines of the program of a decode step with a cache of so many groups of layers."""
    model, tokens = run.model, jnp.zeros((2, 1), jnp.int32)

    def step(params, cache, start):
        logits, view = model.apply(params, tokens, cache.view(None, 64), start)
        return logits, view.cache

    cache = jax.eval_shape(lambda: model.new_cache(2, 64, longest_chunk=4))
    assert len(cache.groups) == groups
    return jax.jit(step).lower(run.abstract_state.params, cache, tokens[:, 0]).as_text().count("\n")


def of_period(repeats: int, *overrides: str, devices: int = 1) -> TrainProgram:
    """A program whose layers are `repeats` times (dense, dense, dense, experts)."""
    # not two dense layers: loops over two of them and over two repeats would have functions of one shape, which stand
    # in the program once
    dense = [layer for layer in range(4 * repeats) if layer % 4 < 3]
    model = {**families.MODELS["qwen3_moe"], "layers": 4 * repeats, "dense_layers": dense}
    run = program({**TINY, "model": model}, *overrides, devices=devices, remat="full")
    assert [(len(one.period), one.repeats) for one in run.model.decoder.layer_groups] == [(4, repeats)]
    return run


def test_the_program_does_not_grow_with_the_number_of_layers():
    few, many = (lines_of_a_step(program(TINY, f"model.layers={layers}")) for layers in (2, 24))
    assert many == few


@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_program_does_not_grow_with_the_repeats_of_a_period(pp):
    """Nor with those of a stage: each of two stages has 1, 2 or 4."""
    sizes = [lines_of_a_step(of_period(repeats, f"mesh.pp={pp}", devices=pp)) for repeats in (2, 4, 8)]
    assert max(sizes) == min(sizes)


def test_a_cached_program_does_not_grow_with_the_repeats_of_a_period():
    few, many = (lines_of_decoding(of_period(repeats), groups=1) for repeats in (2, 8))
    assert many == few


def test_a_cached_program_with_rings_does_not_grow_with_the_number_of_layers():
    """Layers with and without a ring alternate: a step of the loop computes one of each."""
    models = ({**TINY, "model": {**families.MODELS["gemma2"], "layers": layers}} for layers in (4, 24))
    few, many = (lines_of_decoding(program(model), groups=2) for model in models)
    assert many == few


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaaa", [("aaaa", "a")]),
        ("ababab", [("ababab", "ab")]),
        ("ababa", [("abab", "ab"), ("a", "a")]),
        ("abbb", [("a", "a"), ("bbb", "b")]),
        ("aabaab", [("aabaab", "aab")]),
        ("aba", [("a", "a"), ("b", "b"), ("a", "a")]),
    ],
)
def test_layers_that_repeat_are_one_group(kinds, expected):
    groups = layer_groups_of(kinds)
    assert [(("".join(group.period)) * group.repeats, "".join(group.period)) for group in groups] == expected
    assert starts(groups) == [sum(len(whole) for whole, _ in expected[:i]) for i in range(len(groups) + 1)]


# tokens of a chunk; attention of the long one makes keys of all heads from the cached latents
CHUNKS = {"long": 16, "short": 8}


@pytest.mark.parametrize(("family", "chunk"), [("deepseek_v2", "long"), ("deepseek_v2", "short"), ("gemma", "long")])
def test_devices_compute_their_own_heads_of_a_chunk(family, chunk):
    """The cache has one head, which all heads of queries share: the queries stay split."""
    run = program({**TINY, "model": families.MODELS[family]}, "mesh.tp=4", devices=4)
    placement, tokens = run.placement.for_decoding(), jnp.zeros((2, CHUNKS[chunk]), jnp.int32)
    model, partition = placement.model, placement.partition

    @jax.jit
    def chunk_step(params, cache, start):
        logits, view = model.apply(params, tokens, cache.view(None, 32), start)
        return logits, view.cache

    with use(partition):
        cache = jax.eval_shape(lambda: model.new_cache(2, 32))
        assert {segment.shape[2] for segment in jax.tree.leaves(cache)} == {1}
        lowered = chunk_step.lower(placement.abstract(jnp.dtype("float32")), cache, jnp.zeros(2, jnp.int32))
    if family == "deepseek_v2":
        a = run.model.decoder.layers[0].attention
        made = f"tensor<2x{a.heads}x32x{a.nope_dims + a.v_dims}xf32>"
        assert (made in lowered.as_text()) == (chunk == "long")
    found = [one for one in collectives(lowered.compile().as_text()) if one.loops]
    assert found
    assert {one.kind for one in found} == {"all-reduce"}


def test_chunks_of_every_size_attend_to_the_same_latents():
    run = program({**TINY, "model": families.MODELS["deepseek_v2"]}, "model.layers=1", "model.dense_layers=[]")
    model, params = run.model, run.init(jax.random.key(2)).params
    tokens = TOKENS[0, :2, :32]
    expected, _ = jax.jit(model.apply)(params, tokens)

    @jax.jit
    def step(params, tokens, cache, start):
        logits, view = model.apply(params, tokens, cache.view(None, 40), start)
        return logits, view.cache

    for size in (*CHUNKS.values(), 1):
        cache = model.new_cache(2, 40)
        for start in range(0, 32, size):
            now = slice(start, start + size)
            logits, cache = step(params, tokens[:, now], cache, np.full(2, start, np.int32))
            # float32; the programs add in another order
            np.testing.assert_allclose(logits, expected[:, now], rtol=0, atol=1e-5, err_msg=f"{size} at {start}")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_names_its_dimensions(family):
    run = program({**TINY, "model": families.MODELS.get(family, TINY["model"])})
    shapes = run.abstract_state.params
    axes = run.model.axes
    assert jax.tree.structure(map_axes(lambda _: 0, axes)) == jax.tree.structure(shapes)
    ranks = map_axes(len, axes)
    jax.tree.map(lambda rank, shape: np.testing.assert_equal(rank, shape.ndim), ranks, shapes)


def test_a_parameter_without_names_is_an_error_that_gives_its_path():
    import haiku as hk

    with pytest.raises(UserError, match="linear/w"):
        collect_axes(lambda: hk.Linear(3)(jnp.zeros((1, 2))))
    init = with_axes(hk.initializers.Constant(0.0), "embed")
    with pytest.raises(UserError, match=re.escape("a parameter of shape (2, 3) cannot have dimensions ('embed',)")):
        collect_axes(lambda: hk.Linear(3, with_bias=False, w_init=init)(jnp.zeros((1, 2))))


@pytest.mark.parametrize(("norm", "pe"), covering(NORMS, ENCODINGS))
def test_every_switch_gives_a_model_of_unit_scale(norm, pe):
    """A fresh model is near uniform, and its norms have the parameters that their names promise."""
    run = program(TINY, f"model.norm={norm}", f"model.pe={pe}", "model.layers=1")
    params = run.init(jax.random.key(0)).params
    fields = set(params["blocks"]["norm"])
    assert fields == ({"scale", "offset"} if norm == "layernorm" or norm.endswith("-bias") else {"scale"})
    assert params["blocks"]["norm"]["scale"].shape == ((1,) if norm.startswith("scalenorm") else (1, 64))
    logits, _ = jax.jit(run.model.apply)(params, TOKENS[0, :, :-1])
    assert abs(float(jnp.std(logits)) - 1) < 0.3


@pytest.mark.parametrize("remat", ["full", "save_attn", "save_matmuls"])
def test_recomputing_changes_no_gradient(remat):
    def gradient(policy: str):
        run = program(TINY, remat=policy)
        state = run.init(jax.random.key(0))
        return jax.jit(run._gradients)(state, Sequences(TOKENS[:1]))[0]

    def close(a, b):
        # float32; the recomputed values may be fused otherwise
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())

    jax.tree.map(close, gradient(remat), gradient("none"))


def test_policies_differ_in_what_they_recompute():
    def flops(policy: str) -> float:
        run = program(TINY, "compute.scan_unroll=3", remat=policy)  # a loop's body would be counted once
        state = run.abstract_state
        lowered = jax.jit(run._gradients).lower(state, Sequences(TOKENS[:1]))
        return lowered.compile().cost_analysis()["flops"]

    assert flops("none") < flops("save_matmuls") < flops("save_attn") < flops("full")


def test_only_the_routers_products_are_exact_on_a_tpu():
    """At the default precision a TPU rounds float32 to bfloat16, and a rounded score may choose another expert."""
    run = program({**TINY, "model": families.MODELS["mixtral"]}, "compute.dtype=bfloat16")
    params, tokens = run.placement.abstract(jnp.dtype(jnp.bfloat16)), jax.ShapeDtypeStruct((1, 8), jnp.int32)
    traced = jax.jit(lambda params, tokens: run.model.apply(params, tokens)[0]).trace(params, tokens)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    exact = [line for line in text.splitlines() if "dot_general" in line and "HIGHEST" in line]
    # of the one layer that the loop has
    assert len(exact) == 1
    assert "tensor<64x6xf32>" in exact[0]


def test_derived_sizes():
    config = gptj.GptJConfig(layers=1, d_model=96, n_heads=4, n_vocab=50257)
    assert (config.d_head, config.d_ff, config.decoder().padded_vocab) == (24, 384, 50304)
