"""The sizes that a config checks for divisibility are those of the arrays that its model shards."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from support.builders import TINY, program

from mesh_transformer.config import MeshConfig, mesh_shape, parse_config
from mesh_transformer.config.mesh import SWITCHES, check_sizes, parts
from mesh_transformer.errors import UserError
from mesh_transformer.parallel.sharding import Partition, use

SHIPPED = ["6B_roto_256", "6B_finetune_v3-8", "70M", "125M", "350M", "1.3B", "2.7B", "tiny_shakespeare"]
VARIANTS = {
    "t5": {"pe": "t5", "n_heads": 4, "d_head": 12},
    "fixed": {"pe": "fixed", "norm": "scalenorm", "d_ff": 96, "d_model": 80},
    "odd_vocab": {"n_vocab": 500, "vocab_multiple": 3, "d_head": 8},
}
MESHES = [
    mesh_shape(dp=dp, fsdp=fsdp, tp=tp)
    for dp, fsdp, tp in itertools.product((1, 2, 3), (1, 2, 5), (1, 2, 3, 4, 8, 16, 24, 32, 64))
]


class Names(Partition):
    """A partition that returns the names of dimensions instead of shardings."""

    def sharding(self, *axes):
        return axes


def arrays(run, batch, seq, monkeypatch):
    """(shape, names) of every parameter and of every activation that the model constrains."""
    found = set()
    params = run.abstract_state.params
    names = jax.tree.leaves(run.model.axes, is_leaf=lambda node: isinstance(node, tuple))
    found |= {(leaf.shape, axes) for leaf, axes in zip(jax.tree.leaves(params), names, strict=True)}

    def record(x, axes):
        found.add((x.shape, axes))
        return x

    monkeypatch.setattr(jax.lax, "with_sharding_constraint", record)
    with use(Names(run.partition.mesh, run.partition.rules)):
        jax.eval_shape(run.model.apply, params, jax.ShapeDtypeStruct((batch, seq), jnp.int32))
    return found


def divides(found, mesh, shape):
    return all(
        size % parts(shape, rules_of(mesh), name) == 0
        for array, names in found
        for size, name in zip(array, names, strict=True)
        for rules_of in SWITCHES.values()
        if name is not None
    )


def accepted(config, mesh, shape):
    try:
        check_sizes(config.sizes, mesh, shape)
    except UserError:
        return False
    return True


@pytest.mark.parametrize("name", [*SHIPPED, *VARIANTS])
def test_the_config_refuses_exactly_the_meshes_that_do_not_divide_the_arrays(name, repo, monkeypatch):
    if name in VARIANTS:
        raw = {**TINY, "model": TINY["model"] | VARIANTS[name]}
    else:
        raw = json.loads((repo / f"configs/{name}.json").read_text())
    alone = ["mesh.fsdp=1", "mesh.tp=1", "data.batch_size=6", "data.seq=24"]
    config = parse_config(raw, alone)
    found = arrays(program(raw, *alone), 6, 24, monkeypatch)
    verdicts = set()
    for shape, switches in itertools.product(MESHES, itertools.product((False, True), repeat=len(SWITCHES))):
        mesh = MeshConfig(**dict(zip(SWITCHES, switches, strict=True)))
        verdict = divides(found, mesh, shape)
        assert accepted(config, mesh, shape) == verdict, (shape, mesh)
        verdicts.add(verdict)
    assert verdicts == {True, False}
