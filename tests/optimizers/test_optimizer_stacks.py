"""Each optimizer on each kind of stack of layers: steps, and a run that is saved and resumed."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.builders import program
from support.covering import covering
from support.families import MODELS

from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.optimizers import OPTIMIZERS

SIZES = {"d_model": 32, "n_heads": 4, "n_vocab": 64, "seq": 12}
TOKENS = np.random.default_rng(0).integers(0, 64, (3, 2, 4, 13)).astype(np.int32)
# the fields of the model, and the mesh
STACKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "one_stack": ({"family": "gptj", "layers": 2, "pe_rotary_dims": 4}, ()),
    "learned_positions": ({**MODELS["gpt2"], "layers": 2}, ()),
    "windows_in_turn": (MODELS["gpt_neo"], ()),
    "four_norms": (MODELS["gemma2"], ()),
    "tied_head": (MODELS["qwen2"], ()),
    "experts": (MODELS["mixtral"], ()),
    "dense_first": (MODELS["qwen3_moe"], ()),
    "dense_in_turn_shared_expert": (MODELS["qwen2_moe"], ()),
    "latents_dense_first": (MODELS["deepseek_v2"], ()),
    "latents_biased_router": (MODELS["deepseek_v3"], ()),
    "stages": ({"family": "gptj", "layers": 4, "pe_rotary_dims": 4}, ("mesh.pp=2",)),
    "stages_dense_first": ({**MODELS["deepseek_v3"], "layers": 5, "dense_layers": [0]}, ("mesh.pp=2",)),
    "mesh_dense_first": ({**MODELS["qwen3_moe"], "layers": 4}, ("mesh.fsdp=2", "mesh.tp=2")),
    "mesh_dense_in_turn_zero1": (MODELS["qwen2_moe"], ("mesh.dp=2", "mesh.tp=2", "mesh.zero1=true")),
    "mesh_latents_zero1": (MODELS["deepseek_v2"], ("mesh.dp=2", "mesh.ep=2", "mesh.zero1=true")),
}
DAILY = ["windows_in_turn", "tied_head", "latents_biased_router", "stages", "mesh_dense_in_turn_zero1"]
# so that matrices of tiny models are factored
FIELDS = {"adafactor": ("optimizer.min_dim_size_to_factor=8",)}


def devices(mesh: tuple[str, ...]) -> int:
    sizes = [field.partition("=")[2] for field in mesh]
    return int(np.prod([int(size) for size in sizes if size.isdigit()], dtype=int))


@pytest.mark.parametrize(("stack", "optimizer"), covering(STACKS, OPTIMIZERS, daily=(DAILY, OPTIMIZERS)))
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, stack: str, optimizer: str) -> None:
    model, mesh = STACKS[stack]
    raw = {
        "model": {**model, **SIZES},
        "optimizer": {"lr": 1e-3, "warmup_steps": 0, "anneal_steps": 10, "gradient_accumulation_steps": 2},
        "data": {"batch_size": 4},
    }
    overrides = (f"optimizer.name={optimizer}", *FIELDS.get(optimizer, ()), *mesh)
    run = program(raw, *overrides, devices=devices(mesh))
    state = run.init(jax.random.key(0))
    start = jax.device_get(state.params)
    for tokens in TOKENS[:2]:
        state, metrics = run.train_step(state, tokens)
        assert metrics["finite"]
    kept = jax.device_get(state)
    # every array of every stack has moved
    still = [name for name, array in flatten(kept.params).items() if np.array_equal(array, flatten(start)[name])]
    assert not still
    store = CheckpointStore(str(tmp_path))
    store.save(2, state, {})
    store.close()
    expected, expected_metrics = run.train_step(state, TOKENS[2])
    found = CheckpointStore(str(tmp_path), read_only=True).restore(run.abstract_state)
    assert found is not None
    assert_equal(found.state, kept)
    resumed, resumed_metrics = run.train_step(found.state, TOKENS[2])
    assert_equal(resumed, jax.device_get(expected))
    assert resumed_metrics["train/loss"] == expected_metrics["train/loss"]


def assert_equal(state: Any, expected: Any) -> None:
    arrays, found = flatten(expected), flatten(jax.device_get(state))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
