"""Gradients that the replicas sum once a step (mesh.sum_gradients per_step)."""

import pytest
from support.builders import TINY, program
from support.covering import covering
from support.parity import SMALL, assert_equals_one_device

from mesh_transformer.estimate.hlo import collectives
from mesh_transformer.train.step import compile_step

PER_STEP = "mesh.sum_gradients=per_step"
MESHES = {
    "dp2_fsdp2_tp2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2"],
    "dp2_fsdp2_tp2_split": ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.shard_activations=true"],
    "dp4_tp2_overlap": ["mesh.dp=4", "mesh.tp=2", "mesh.overlap_tp=true"],
    "dp2_cp2_tp2": ["mesh.dp=2", "mesh.cp=2", "mesh.tp=2"],
    "dp2_fsdp2_cp2_early": ["mesh.dp=2", "mesh.fsdp=2", "mesh.cp=2", "mesh.gather_weights=per_step"],
    "dp2_pp2_tp2": ["mesh.dp=2", "mesh.pp=2", "mesh.tp=2"],
    "dp2_pp2_cp2_interleaved": ["mesh.dp=2", "mesh.pp=2", "mesh.cp=2", "mesh.schedule=interleaved"],
}
# qwen2: grouped heads, a table that embedding and head share
FAMILIES = ["gptj", "gptj_t5", "qwen2"]
DAILY = ["dp4_tp2_overlap", "dp2_fsdp2_cp2_early", "dp2_pp2_cp2_interleaved"]


@pytest.mark.parametrize(("family", "mesh"), covering(FAMILIES, MESHES, daily=(FAMILIES, DAILY)))
def test_training_equals_one_device(family: str, mesh: str) -> None:
    """The noise scale too: the part of a microbatch that a replica has is a microbatch of one device."""
    stages = "pp2" in mesh
    model = {**SMALL[family], "layers": 4 if stages else 2}
    replicas = 4 if "dp4" in mesh else 2
    assert_equals_one_device(model, PER_STEP, *MESHES[mesh], remat="full" if stages else "none", parts=replicas)


def _sums_in_loops(*overrides: str) -> int:
    compiled = compile_step(program(TINY, "mesh.dp=8", *overrides, devices=8), 2, 8)
    return sum(bool(one.loops) for one in collectives(compiled.as_text()) if one.kind == "all-reduce")


def test_replicas_send_nothing_in_a_loop() -> None:
    assert _sums_in_loops(PER_STEP) == 0


def test_the_check_of_sums_can_fail() -> None:
    assert _sums_in_loops() > 0
