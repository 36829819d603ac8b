"""Training of models with experts, which devices split (mesh.ep) or hold whole, against the same run on one device."""

import math
from typing import Any

import pytest
from support.covering import covering
from support.parity import SMALL, assert_equals_one_device

MESHES = {
    "ep4": ["mesh.ep=4"],
    "dp2_ep2_gather": ["mesh.dp=2", "mesh.ep=2", "experts.exchange=gather"],
    "dp2_ep4": ["mesh.dp=2", "mesh.ep=4", "data.batch_size=8"],
    "fsdp2_ep2_tp2": ["mesh.fsdp=2", "mesh.ep=2", "mesh.tp=2"],
    "fsdp2_tp2_sharded": ["mesh.fsdp=2", "mesh.tp=2", "mesh.shard_activations=true"],
    "cp2_ep2_tp2": ["mesh.cp=2", "mesh.ep=2", "mesh.tp=2"],
    "pp2_ep2_tp2": ["mesh.pp=2", "mesh.ep=2", "mesh.tp=2"],
    "pp2_fsdp2_tp2": ["mesh.pp=2", "mesh.fsdp=2", "mesh.tp=2"],
    "dp2_ep2_zero1": ["mesh.dp=2", "mesh.ep=2", "mesh.zero1=true"],
    "interleaved_pp2_ep2": ["mesh.pp=2", "mesh.ep=2", "mesh.schedule=interleaved"],
}
DAILY = [
    "interleaved_pp2_ep2",
    "dp2_ep4",
    "fsdp2_ep2_tp2",
    "pp2_ep2_tp2",
    "cp2_ep2_tp2",
    "dp2_ep2_zero1",
    "dp2_ep2_gather",
]
FAMILIES = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "jaxformer"]
CHANGES: dict[str, dict[str, Any]] = {
    # the gradient of a clipped value jumps where clipping begins, so that a rounding error is visible
    "olmoe": {"clip_qkv": None},
    "deepseek_v3": {"router_groups": 4},
    "jaxformer": {"block_layers": 2},
}
# the stages of a pipeline share out the four layers after the dense ones
IN_STAGES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"dense_layers": []},
    "qwen3_moe": {"dense_layers": [0], "layers": 5},
    "deepseek_v2": {"dense_layers": [0], "layers": 5},
    "deepseek_v3": {"dense_layers": [0, 1], "layers": 6},
    # they share out blocks
    "jaxformer": {"layers": 8},
}


@pytest.mark.parametrize(("family", "mesh"), covering(FAMILIES, MESHES, daily=(FAMILIES, DAILY)))
def test_training_equals_one_device(family: str, mesh: str) -> None:
    overrides, in_stages = MESHES[mesh], mesh.startswith(("pp", "interleaved"))
    model = {**SMALL[family], **CHANGES.get(family, {}), "layers": 4, "n_experts": 8}
    model |= IN_STAGES.get(family, {}) if in_stages else {}
    axes = [one.partition("=") for one in overrides if one.startswith("mesh.")]
    devices = math.prod(int(size) for _, _, size in axes if size.isdigit())
    remat, microbatches = ("full", 6) if in_stages else ("none", 2)
    assert_equals_one_device(model, *overrides, devices=devices, remat=remat, microbatches=microbatches)
