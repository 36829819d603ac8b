"""Parsing collectives from the text of small programs with known collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.hlo import Array, Collective, collectives

ASYNCHRONOUS = """HloModule pair, entry_computation_layout={(bf16[2,4]{1,0})->bf16[8,4]{1,0}}

ENTRY %main (p: bf16[2,4]) -> bf16[8,4] {
  %p = bf16[2,4]{1,0:T(8,128)(2,1)} parameter(0)
  %start = (bf16[2,4]{1,0:T(8,128)(2,1)}, bf16[8,4]{1,0:T(8,128)(2,1)}) all-gather-start(%p), dimensions={0}
  ROOT %done = bf16[8,4]{1,0:T(8,128)(2,1)} all-gather-done(%start)
}
"""


def test_loops_around_a_collective_are_named():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split = NamedSharding(mesh, PartitionSpec(None, "x"))

    def program(x, w):
        def outer(x, _):
            with jax.named_scope("inner"):
                x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w @ w.T), None), x, None, 4)
            return x, None

        x, _ = jax.lax.scan(outer, x, None, 3)
        return x.sum() + (x @ w).sum()

    x, w = jnp.ones((6, 10)), jnp.ones((10, 8))
    compiled = jax.jit(program, in_shardings=(None, split)).lower(x, w).compile()
    found = collectives(compiled.as_text())
    inner = [one for one in found if len(one.loops) == 2]
    assert [(one.kind, one.arrays, one.nbytes) for one in inner] == [("all-reduce", (Array("f32", (6, 10)),), 240)]
    assert inner[0].loops[1].endswith("inner/while")
    assert any(one.loops == () for one in found)


def test_an_asynchronous_collective_counts_once_with_its_result():
    assert collectives(ASYNCHRONOUS) == [Collective("all-gather", (Array("bf16", (8, 4)),), ())]


@pytest.mark.parametrize(("dtype", "nbytes"), [("pred", 6), ("s4", 3), ("f8e4m3fn", 6), ("bf16", 12), ("c64", 48)])
def test_bytes_of_an_array(dtype, nbytes):
    assert Array(dtype, (2, 3)).nbytes == nbytes


def test_text_without_a_computation_is_an_error():
    with pytest.raises(ValueError, match="not an HLO module"):
        collectives("nothing compiled")
