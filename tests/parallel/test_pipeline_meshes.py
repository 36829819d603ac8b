"""Training with layers that are split into stages (mesh.pp), against the same run on one device."""

import pytest
from support.covering import covering
from support.parity import SMALL, assert_equals_one_device

MESHES = {
    "pp4": ["mesh.pp=4"],
    "pp2_fsdp2_tp2": ["mesh.pp=2", "mesh.fsdp=2", "mesh.tp=2"],
    "pp2_dp2_tp2_zero1": ["mesh.pp=2", "mesh.dp=2", "mesh.tp=2", "mesh.zero1=true"],
    "pp2_cp2_tp2": ["mesh.pp=2", "mesh.cp=2", "mesh.tp=2", "mesh.shard_activations=true"],
    "pp2_cp2_fsdp2_ulysses": ["mesh.pp=2", "mesh.cp=2", "mesh.fsdp=2", "mesh.context_mode=ulysses"],
    "pp4_cp2": ["mesh.pp=4", "mesh.cp=2"],
    "pp2_dp2_tp2_overlap": ["mesh.pp=2", "mesh.dp=2", "mesh.tp=2", "mesh.overlap_tp=true"],
    "pp2_cp2_tp2_overlap": ["mesh.pp=2", "mesh.cp=2", "mesh.tp=2", "mesh.overlap_tp=true"],
    "interleaved_pp2_tp2": ["mesh.pp=2", "mesh.tp=2", "mesh.schedule=interleaved"],
    "interleaved_pp2_fsdp2_per_step": [
        "mesh.pp=2",
        "mesh.fsdp=2",
        "mesh.schedule=interleaved",
        "mesh.gather_weights=per_step",
    ],
}
DEVICES = {"pp4": 4, "interleaved_pp2_tp2": 4, "interleaved_pp2_fsdp2_per_step": 4}
# six layers, three a stage: the layers differ in numbers, without a period that a stage has
NUMBERS = {"gemma3": {"full_every": 4}, "smollm3": {"no_rotary_every": 4}}
DAILY = ["pp4", "pp2_fsdp2_tp2", "pp2_cp2_fsdp2_ulysses", "pp2_cp2_tp2_overlap", "interleaved_pp2_fsdp2_per_step"]
FAMILIES = ["gptj", "gptj_t5", "gptj_learned", "gpt_neox", "qwen2", "gemma2"]


@pytest.mark.parametrize(
    ("family", "mesh"),
    covering(FAMILIES, MESHES, daily=(["gemma2", "gptj_learned", "gpt_neox", "qwen2", "gptj_t5"], DAILY)),
)
def test_training_equals_one_device(family: str, mesh: str) -> None:
    model = {**SMALL[family], "layers": 4}
    assert_equals_one_device(model, *MESHES[mesh], devices=DEVICES.get(mesh, 8), remat="full", microbatches=6)


@pytest.mark.parametrize(
    ("family", "mesh"),
    covering(NUMBERS, ("pp2_fsdp2_tp2", "pp2_cp2_tp2"), daily=(["gemma3"], ["pp2_cp2_tp2"])),
)
def test_stages_with_an_odd_number_of_layers_that_differ(family: str, mesh: str) -> None:
    model = {**SMALL[family], "layers": 6, **NUMBERS[family]}
    assert_equals_one_device(model, *MESHES[mesh], remat="full", microbatches=4)
