"""Gradients in bfloat16 against float32, array by array, of one layer of each kind of module."""

import functools

import jax
import numpy as np
import pytest
from support.builders import program
from support.covering import covering
from support.families import MODELS

from mesh_transformer.models.block import MODULES
from mesh_transformer.parallel.sharding import use
from mesh_transformer.sequences import Sequences
from mesh_transformer.train.step import TrainProgram

GPTJ = {"n_heads": 4, "n_vocab": 512, "pe_rotary_dims": 4}
EXPERTS = {"dense_layers": []}
CASES = {
    "gptj with t5's bias": {**GPTJ, "pe": "t5"},
    "gpt2": MODELS["gpt2"],
    "llama": MODELS["llama"],
    "deepseek_v3": MODELS["deepseek_v3"] | EXPERTS,
    "jaxformer": MODELS["jaxformer"] | {"block_layers": 1},
}
FREQUENT = 3
# 8,192 tokens, of which a quarter are one id
_RANDOM = np.random.default_rng(0)
TOKENS = np.where(_RANDOM.random((1, 16, 513)) < 0.25, FREQUENT, _RANDOM.integers(0, 512, (1, 16, 513))).astype(
    np.int32
)
# bfloat16 has 8 bits, and a gradient is rounded by some operations of a layer: 0.002 to 0.01 measured. A table whose
# gradient is summed in bfloat16 has 0.1 to 0.48.
TABLES, DENSE = 0.02, 0.03
# a rounded score of a router may choose another expert: up to 0.043 measured
ROUTED = 0.1


def _program(case: str, dtype: str) -> TrainProgram:
    sizes = {"layers": 1, "d_model": 32, "seq": 512}
    return program({"model": CASES[case] | sizes, "data": {"batch_size": 16}}, dtype=dtype)


@functools.cache
def _gradients(case: str, dtype: str) -> dict[str, np.ndarray]:
    run = _program(case, dtype)

    def gradients(state, tokens):
        with use(run.partition):
            return run._gradients(state, Sequences(tokens))[0]

    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.jit(gradients)(run.init(jax.random.key(0)), TOKENS))
    return {"/".join(key.key for key in path): np.asarray(leaf, np.float64) for path, leaf in leaves}


def _error(case: str, name: str, rows: slice | int = slice(None)) -> float:
    """Root mean square of the difference, as a part of the gradient's."""
    ours, exact = (_gradients(case, dtype)[name][rows] for dtype in ("bfloat16", "float32"))
    return np.linalg.norm(ours - exact) / (np.linalg.norm(exact) or 1)


def test_the_cases_have_all_kinds_of_modules():
    layers = [layer for case in CASES for layer in _program(case, "float32").model.decoder.layers]
    assert {type(mechanism) for layer in layers for mechanism in layer.mechanisms} == set(MODULES)


@pytest.mark.parametrize("case", covering(CASES, daily=([case for case in CASES if case != "jaxformer"],)))
def test_gradients_in_bfloat16_are_near_those_in_float32(case):
    errors = {name: _error(case, name) for name in _gradients(case, "float32")}
    # its exact gradient is zero: it adds one number to all logits of a query
    errors.pop("blocks/attention/k/b", None)
    largest = ROUTED if "blocks/ff/router/w" in errors else DENSE
    assert {name: error for name, error in errors.items() if error > largest} == {}
    tables = {name: errors[name] for name in ("embed/positions/w", "embed/relative/w") if name in errors}
    tables["the frequent token"] = _error(case, "embed/tokens/w", FREQUENT)
    assert {name: error for name, error in tables.items() if error > TABLES} == {}
