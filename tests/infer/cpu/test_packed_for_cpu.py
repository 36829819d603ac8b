"""The layout of the parameters for decoding on a CPU. tests/infer has its tokens for all families and for rings."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support import families
from support.builders import TINY, program
from support.engines import SAMPLED, SLOTS, complete, engine_of, packed, prompt_of

from mesh_transformer.infer.cpu.packed import PackedLayer, Transposed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_parameters_give_the_same_tokens(dtype: str) -> None:
    run = program(TINY, "mesh.tp=1", "model.seq=64", dtype=dtype)
    params = run.model.cast(run.init(jax.random.key(3)).params)
    (expected,), (made,) = (
        complete(engine_of(run, given, slots=slots), [(prompt_of(1, 21), SAMPLED)])
        for given, slots in ((params, SLOTS), (packed(run, params), 1))
    )
    assert made.ids == expected.ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_adapters_give_the_same_tokens(dtype: str) -> None:
    """Of latent attention, routed and shared experts, and matrices that share an a."""
    raw = {**TINY, "model": families.MODELS["deepseek_v3"], "lora": {"rank": 3, "alpha": 6}}
    run = program(raw, "mesh.tp=1", dtype=dtype)
    state = run.init(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    adapters = jax.tree.map(lambda x: 0.1 * jax.random.normal(next(keys), x.shape), state.params)
    tokens = []
    for given in (adapters, state.params):
        params = run.model.cast(run.parameters(state._replace(params=given)))
        of_layouts = (params, SLOTS), (packed(run, params), 1)
        (expected,), (made,) = (
            complete(engine_of(run, given, slots=slots), [(prompt_of(1, 21), SAMPLED)]) for given, slots in of_layouts
        )
        assert made.ids == expected.ids
        tokens.append(made.ids)
    assert tokens[0] != tokens[1]


def mixed(dtype: str) -> tuple[Any, Any]:
    """A model whose first layers are dense, and whose others have routed and shared experts."""
    run = program({**TINY, "model": families.MODELS["deepseek_v2"]}, "mesh.tp=1", dtype=dtype)
    return run, run.model.cast(run.init(jax.random.key(0)).params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_number_is_stored_once(dtype: str) -> None:
    """The kinds of layers join different matrices."""
    run, params = mixed(dtype)
    assert len(run.model.decoder.kinds) > 1
    stored, before = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (packed(run, params), params))
    assert stored == before


def test_what_xla_would_convert_is_stored_as_bits() -> None:
    """Matrices of two bytes an element; not the router, which is float32, nor vectors."""
    run, params = mixed("bfloat16")
    layers = packed(run, params)["blocks"]
    (number, row), experts = next(iter(_with_experts(layers))), params["blocks"]
    matrix = row["ff/experts"]["in"]
    assert (matrix.dtype, matrix.ndim) == (jnp.uint16, 3)
    name = next(name for name in experts if name.endswith("ff/experts"))
    first = number - sum("ff/experts" not in layer.others for layer in layers[:number])
    values = jax.lax.bitcast_convert_type(matrix, jnp.bfloat16)
    assert (values == experts[name]["in"][first]).all()
    assert isinstance(row["ff/router"]["w"], Transposed)
    assert row["ff/router"]["w"].w_FD.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(row) if leaf.ndim == 1} <= {
        jnp.dtype("bfloat16"),
        jnp.dtype("float32"),
    }
    assert all(one.dtype == jnp.uint16 for layer in layers for one in layer.joined)
    # most of the last layer is applied to one position of a prompt
    assert [layer.joined != () for layer in layers] == [True] * (len(layers) - 1) + [False]


def _with_experts(layers: tuple[PackedLayer, ...]) -> Any:
    return ((number, layer.others) for number, layer in enumerate(layers) if "ff/experts" in layer.others)
