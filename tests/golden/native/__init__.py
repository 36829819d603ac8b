"""What commit 50565e5 computed and saved, as test code reads it: README.md beside this file."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from support.builders import program

from mesh_transformer.config import parse_config
from mesh_transformer.runtime.training.feeds import read_train_set

HERE = Path(__file__).parent
_SIZES = {"layers": 2, "d_model": 16, "n_heads": 2, "n_vocab": 40, "vocab_multiple": 8, "seq": 16}
_SHARED = {"n_kv_heads": 1, "d_head": 8, "d_ff": 24}
_EXPERTS = {"n_experts": 4, "experts_per_token": 2}
_LATENTS = {
    "kv_rank": 8,
    "nope_dims": 8,
    "rotary_dims": 4,
    "v_dims": 8,
    "d_ff": 24,
    "expert_d_ff": 8,
    "shared_d_ff": 8,
}
# the group `model` of a config, by family
MODELS: dict[str, dict[str, Any]] = {
    "gptj": {**_SIZES, "d_ff": 24, "pe_rotary_dims": 4},
    "gpt_neox": {**_SIZES, "d_ff": 24},
    "gpt2": {**_SIZES, "d_ff": 24},
    # two layers and a rest of one
    "gpt_neo": {**_SIZES, "d_ff": 24, "layers": 3, "window": 5},
    "llama": {**_SIZES, **_SHARED},
    "mistral": {**_SIZES, **_SHARED, "window": 6},
    "qwen2": {**_SIZES, **_SHARED, "layers": 3, "window": 5, "full_layers": 1, "tied_head": True},
    "qwen3": {**_SIZES, **_SHARED},
    "gemma": {**_SIZES, **_SHARED},
    "gemma2": {**_SIZES, **_SHARED, "layers": 4, "window": 5},
    "mixtral": {**_SIZES, **_SHARED, **_EXPERTS, "window": 6},
    "olmoe": {**_SIZES, **_EXPERTS, "d_ff": 24},
    "qwen2_moe": {
        **_SIZES,
        **_SHARED,
        **_EXPERTS,
        "layers": 5,
        "expert_d_ff": 8,
        "shared_d_ff": 12,
        "dense_layers": [0, 2],
    },
    "qwen3_moe": {**_SIZES, **_SHARED, **_EXPERTS, "layers": 5, "expert_d_ff": 8, "dense_layers": [0, 2]},
    "deepseek_v2": {**_SIZES, **_LATENTS, **_EXPERTS, "layers": 3, "dense_layers": [0]},
    "deepseek_v3": {
        **_SIZES,
        **_LATENTS,
        **_EXPERTS,
        "layers": 4,
        "dense_layers": [0, 1],
        "q_rank": 8,
        "router_groups": 2,
        "router_top_groups": 1,
    },
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"name": "adam"},
    # the matrices of these models are factored
    "adafactor": {"name": "adafactor", "min_dim_size_to_factor": 8},
}
_SCHEDULE = {"lr": 1e-2, "warmup_steps": 2, "anneal_steps": 10, "total_steps": 12}
# meshes of the recorded losses, with the devices that each takes
MESHES: dict[str, tuple[int, list[str]]] = {
    "one device": (1, []),
    "dp2_fsdp2_tp2": (8, ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2"]),
    "pp2": (2, ["mesh.pp=2"]),
}
STEPS = 3
# the group `data` of a run on the files of orders.tar.xz, for each order of the records
ORDERS: dict[str, dict[str, Any]] = {
    "files": {"train_set": "all.index"},
    "across files": {"train_set": "all.index", "batch_across_files": True},
    "window": {"train_set": "all.index", "shuffle": True, "shuffle_window": 6, "seed": 3},
    "compressed": {"train_set": "compressed.index", "shuffle": True, "shuffle_window": 1000, "seed": 4},
    "whole": {"train_set": "all.index", "shuffle": "whole", "seed": 3},
    "mixture": {
        "train_set": {
            "a": {"set": "a.tfrecords", "weight": {"0": 0.7, "5": 0.2}},
            "others": {"set": "others.index", "weight": 0.3, "epochs": 3},
        }
    },
    "mixture in order": {
        "train_set": {"a": {"set": "a.tfrecords", "weight": 1}, "others": {"set": "others.index", "weight": 2}},
        "shuffle": False,
    },
    "text": {"train_set": "text.txt", "tokenizer": "bytes"},
}
ORDERED_STEPS = 12


def train_loader(order: str) -> Any:
    """A loader of the files in the working folder, as a training run of a model with 4 positions opens it."""
    model = {"layers": 1, "d_model": 8, "n_heads": 1, "pe_rotary_dims": 8, "n_vocab": 257, "seq": 4}
    optimizer = {"gradient_accumulation_steps": 2}
    data = {"batch_size": 2, **ORDERS[order]}
    config = parse_config({"model": model, "optimizer": optimizer, "data": data})
    return read_train_set(config, 2, range(2), config.data.tokenizer)


def validation_steps(make_val_loader: Callable[..., Any]) -> list[list[list[int]]]:
    """The tokens of each validation batch of the files in the working folder."""
    loader = make_val_loader("all.index", seq=4, batch=3, rows=range(3), repeat=False)
    return [batch.tokens.tolist() for batch in iter(loader)]


def config_of(family: str, optimizer: str, **sizes: Any) -> dict[str, Any]:
    """The config of a run."""
    return {
        "model": {"family": family, **MODELS[family], **sizes},
        "optimizer": {**OPTIMIZERS[optimizer], **_SCHEDULE},
        "data": {"batch_size": 2},
    }


def unpack(family: str, optimizer: str, folder: Path) -> dict[str, Any]:
    """Unpack a run's step_2 into a folder; returns what 50565e5 computed from it."""
    return unpack_archive(f"{family}-{optimizer}", folder)


def unpack_archive(name: str, folder: Path) -> dict[str, Any]:
    """Unpack an archive into a folder; returns what 50565e5 computed from it."""
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    expected: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return expected


def losses(family: str, mesh: str) -> list[float]:
    """The losses of the first steps of a run with four layers or more, two microbatches and a batch of 8, in
    float32."""
    devices, axes = MESHES[mesh]
    dense = MODELS[family].get("dense_layers", []) if family.startswith("deepseek") else []
    # four layers after the dense ones
    raw = config_of(family, "adam", layers=4 + len(dense))
    raw["optimizer"]["gradient_accumulation_steps"] = 2
    raw["data"]["batch_size"] = 8
    run = program(raw, *axes, devices=devices, remat="full")
    tokens = np.random.default_rng(1).integers(0, raw["model"]["n_vocab"], (STEPS, 2, 8, 17)).astype(np.int32)
    state, found = run.init(jax.random.key(0)), []
    for batch in tokens:
        state, metrics = run.train_step(state, batch)
        found.append(float(metrics["train/loss"]))
    return found
