"""Training with sequences whose positions are split over devices (mesh.cp), against the same run on one device."""

import pytest
from support.covering import covering
from support.parity import SMALL, assert_equals_one_device

MESHES = {
    "cp4": ["mesh.cp=4"],
    "cp2_fsdp2_tp2": ["mesh.cp=2", "mesh.fsdp=2", "mesh.tp=2"],
    "cp2_dp2_tp2_sequence": ["mesh.cp=2", "mesh.dp=2", "mesh.tp=2", "mesh.shard_activations=true", "mesh.zero1=true"],
}
DEVICES = {"cp4": 4}
MODES = ["zigzag", "ring", "ulysses", "gather"]
REMAT = ["full", "save_attn", "save_matmuls"]
DAILY = ["gptj_t5", "qwen2", "gemma2", "deepseek_v2"]
FAMILIES = ["gptj", "gptj_t5", "gptj_learned", "gpt_neox", "qwen2", "gemma2", "mistral", "deepseek_v2", "bloom"]


@pytest.mark.parametrize(("family", "mesh", "mode"), covering(FAMILIES, MESHES, MODES, daily=(DAILY, MESHES, MODES)))
def test_training_equals_one_device(family: str, mesh: str, mode: str) -> None:
    _compare(family, mesh, mode, "none")


@pytest.mark.parametrize(
    ("mesh", "mode", "remat"),
    covering(MESHES, MODES, REMAT, daily=(["cp2_fsdp2_tp2"], ["zigzag"], ["save_attn"])),
)
def test_recomputation_equals_one_device(mesh: str, mode: str, remat: str) -> None:
    _compare("gptj", mesh, mode, remat)


def _compare(family: str, mesh: str, mode: str, remat: str) -> None:
    axes = [*MESHES[mesh], f"mesh.context_mode={mode}"]
    assert_equals_one_device(SMALL[family], *axes, devices=DEVICES.get(mesh, 8), remat=remat)
