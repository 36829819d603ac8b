"""The same parameters, loss and gradients on all meshes; memory and collectives of the compiled programs.

With fsdp and tp no device holds a whole matrix between steps, and no gather returns more than one layer.
"""

import functools
import re

import jax
import numpy as np
import pytest
from support.builders import TINY, program

from mesh_transformer.estimate.hlo import collectives
from mesh_transformer.parallel.sharding import use
from mesh_transformer.sequences import Sequences
from mesh_transformer.train.step import TrainProgram, compile_step

MESHES = {
    "dp8": ["mesh.dp=8"],
    "fsdp8": ["mesh.fsdp=8"],
    "tp8": ["mesh.tp=8"],
    "dp2_fsdp2_tp2": ["mesh.fsdp=2", "mesh.tp=2"],
    "zero1": ["mesh.zero1=true"],
    "fsdp8_per_step": ["mesh.fsdp=8", "mesh.gather_weights=per_step"],
    "tp8_sequence": ["mesh.tp=8", "mesh.shard_activations=true"],
}
TOKENS = np.random.default_rng(0).integers(0, 512, (2, 8, 41)).astype(np.int32)
# float32 sums in another order; the measured difference is 9e-7 of the largest value of each array
TOLERANCE = 1e-5


@functools.cache
def _on(mesh: str) -> TrainProgram:
    return program(TINY, *MESHES[mesh], devices=8, remat="full" if "fsdp" in mesh else "none")


@functools.cache
def _compiled(mesh: str) -> jax.stages.Compiled:
    return compile_step(_on(mesh), 2, 8)


@functools.cache
def _gradients(mesh: str | None):
    run = _on(mesh) if mesh else program(TINY)

    def gradients(state, tokens):
        with use(run.partition):
            return run._gradients(state, Sequences(tokens))

    state = run.init(jax.random.key(1))
    return jax.device_get((state.params, *jax.jit(gradients)(state, TOKENS)))


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_loss_and_gradients_equal_one_device(mesh):
    one_params, one_gradient, one_metrics, one_squares = _gradients(None)
    params, gradient, metrics, squares = _gradients(mesh)
    jax.tree.map(np.testing.assert_array_equal, params, one_params)
    np.testing.assert_allclose(metrics["scalars"]["train/loss"], one_metrics["scalars"]["train/loss"], rtol=TOLERANCE)
    np.testing.assert_allclose(squares, one_squares, rtol=TOLERANCE)

    def close(ours, theirs):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())

    jax.tree.map(close, gradient, one_gradient)


@pytest.mark.parametrize("mesh", ["fsdp8", "tp8"])
def test_matrices_and_moments_are_never_whole_at_rest(mesh):
    run, compiled = _on(mesh), _compiled(mesh)
    state = run.abstract_state
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    shardings = jax.tree.leaves(compiled.input_shardings[0][0])
    matrices = 0
    for (path, leaf), sharding in zip(flat, shardings, strict=True):
        if leaf.ndim - ("blocks" in jax.tree_util.keystr(path)) >= 2:
            matrices += 1
            assert np.prod(sharding.shard_shape(leaf.shape)) * 8 == np.prod(leaf.shape), path
    # six matrices in a block and two tables, each with two moments
    assert matrices == 3 * 8
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    memory = compiled.memory_analysis()
    # vectors and tokens make the difference
    assert whole / 8 <= memory.argument_size_in_bytes < whole / 7
    # all of the state is donated; aliased bytes count shards, as the arguments do
    assert memory.alias_size_in_bytes >= memory.argument_size_in_bytes - TOKENS.nbytes


@pytest.mark.parametrize("mesh", ["fsdp8", "dp2_fsdp2_tp2"])
def test_fsdp_gathers_one_layer_at_a_time(mesh):
    gathered = _gather_sizes(_compiled(mesh).as_text())
    block = jax.tree.map(lambda p: p.shape[1:], _on(mesh).abstract_state.params["blocks"])
    one_layer = sum(np.prod(shape) for shape in jax.tree.leaves(block, is_leaf=lambda x: isinstance(x, tuple)))
    assert gathered
    assert max(gathered) <= one_layer


def test_the_gather_check_can_fail():
    """One gather per step gathers the whole stack, and the check detects it."""
    assert max(_gather_sizes(_compiled("fsdp8_per_step").as_text())) == 3 * 64 * 256


def test_no_remat_keeps_no_gathered_weights():
    """Without recomputation, the backward pass gathers the weights of a layer again instead of keeping those of all
    layers."""
    none = compile_step(program(TINY, "mesh.fsdp=8", devices=8, remat="none"), 2, 8)
    stacked = [size for size in _gather_sizes(none.as_text()) if size > 64 * 256 * 2]
    assert not stacked
    assert not re.search(r"f32\[3,64,256\]", none.as_text())


def test_zero1_splits_moments_and_replicates_weights():
    shardings = _on("zero1").state_shardings
    state = _on("zero1").abstract_state
    weight = ("blocks", "ff/in", "w")
    path = lambda tree: tree[weight[0]][weight[1]][weight[2]]  # noqa: E731
    assert path(shardings.params).is_fully_replicated
    moments = [s for s in jax.tree.leaves(shardings.opt_state) if not s.is_fully_replicated]
    assert len(moments) >= 16
    memory = _compiled("zero1").memory_analysis()
    params = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params))
    assert memory.argument_size_in_bytes < params * (1 + 2 / 7)


def _gather_sizes(hlo: str) -> list[int]:
    """The number of elements of every array that an all-gather returns."""
    return [array.size for found in collectives(hlo) if found.kind == "all-gather" for array in found.arrays]
