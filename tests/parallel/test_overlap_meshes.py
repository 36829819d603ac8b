"""Training with tensor parallelism that splits the positions between products, against the same run on one device:
with overlapped communication (mesh.overlap_tp) and with a gather and a scatter."""

import pytest
from support.builders import TINY, program
from support.covering import covering
from support.parity import SMALL, assert_equals_one_device
from support.replicas import OWN, REPLICAS, sequences_over_tp

from mesh_transformer.train.step import lower_step

MESHES = {
    "tp8": ["mesh.tp=8"],
    "dp2_tp4": ["mesh.dp=2", "mesh.tp=4"],
    "cp2_tp4": ["mesh.cp=2", "mesh.tp=4"],
    "fsdp2_tp4": ["mesh.fsdp=2", "mesh.tp=4"],
    "pp2_fsdp2_tp2": ["mesh.pp=2", "mesh.fsdp=2", "mesh.tp=2"],
    "dp2_cp2_tp2_zero1": ["mesh.dp=2", "mesh.cp=2", "mesh.tp=2", "mesh.zero1=true"],
}
# branches of each form (`spec.sequential`, `sandwich`, `parallel`, `parallel_norms`) are among the families; qwen2 has
# fewer heads of keys than tp 4 and 8, and biases; gemma2 has norms after its products; deepseek_v3 has latents that
# each device holds for its own positions
FAMILIES = ["gptj", "gpt_neox", "qwen2", "qwen3", "gemma2", "deepseek_v3"]
# one dense layer, and a layer with experts for each stage
MODELS = {**SMALL, "deepseek_v3": {**SMALL["deepseek_v3"], "layers": 3}}
REMAT = ["full", "save_attn", "save_matmuls"]
DAILY = ["fsdp2_tp4", "pp2_fsdp2_tp2", "dp2_cp2_tp2_zero1"]


@pytest.mark.parametrize(
    ("family", "mesh"), covering(FAMILIES, MESHES, daily=(["qwen2", "gemma2", "deepseek_v3"], DAILY))
)
def test_training_equals_one_device(family: str, mesh: str) -> None:
    # a pipeline always recomputes
    _compare(family, mesh, "full" if mesh.startswith("pp") else "none")


@pytest.mark.parametrize(
    ("mesh", "remat"),
    covering([name for name in MESHES if name != "pp2_fsdp2_tp2"], REMAT, daily=(["cp2_tp4"], ["save_matmuls"])),
)
def test_recomputation_equals_one_device(mesh: str, remat: str) -> None:
    _compare("gptj", mesh, remat)


def _compare(family: str, mesh: str, remat: str) -> None:
    run = assert_equals_one_device(MODELS[family], *MESHES[mesh], "mesh.overlap_tp=true", remat=remat)
    assert run.partition.overlap_tp


@pytest.mark.parametrize(
    ("family", "mesh"), covering(FAMILIES, MESHES, daily=(["gpt_neox", "deepseek_v3"], ["dp2_tp4", "pp2_fsdp2_tp2"]))
)
def test_training_with_one_gather_and_one_scatter_equals_one_device(family: str, mesh: str) -> None:
    axes = [*MESHES[mesh], "mesh.shard_activations=true", "mesh.overlap_tp=false"]
    assert not assert_equals_one_device(MODELS[family], *axes).partition.overlap_tp


@pytest.mark.parametrize("mesh", REPLICAS)
def test_a_replica_gathers_and_scatters_its_own_sequences(mesh: str) -> None:
    run = program(TINY, *REPLICAS[mesh], "mesh.shard_activations=true", "model.layers=2", devices=8)
    # machine code is not needed
    compiled = lower_step(run, 1, 4 * OWN).compile(compiler_options={"xla_backend_optimization_level": 0})
    assert sequences_over_tp(compiled.as_text()) == {"all-gather": {OWN}, "reduce-scatter": {OWN}}
