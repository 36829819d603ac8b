"""Train a tiny model like JAXformer's on pp 2 x fsdp 2 x tp 2 and on one device, and write what chapter 9 reads.

    python docs/guide/results/09_equality.py

writes 09_equality.json. It takes some minutes of CPU time, nearly all of it to compile the two programs.
"""

import json
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PJRT_NPROC"] = "32"

import jax
import numpy as np

from mesh_transformer.config import parse_config
from mesh_transformer.estimate.hlo import Instruction, Module
from mesh_transformer.models.placement import Placement
from mesh_transformer.sequences import Sequences
from mesh_transformer.train.step import TrainProgram, lower_step

# two blocks of two layers, of which the second has experts
TINY: dict[str, Any] = {
    "model": {
        "family": "jaxformer",
        "layers": 4,
        "block_layers": 2,
        "d_model": 32,
        "n_heads": 4,
        "latent_dim": 16,
        "rotary_dims": 8,
        "n_experts": 4,
        "experts_per_token": 2,
        "n_vocab": 64,
        "vocab_multiple": 64,
        "seq": 32,
    },
    "experts": {"balance_loss": 8e-4, "z_loss": 0},
    "optimizer": {"lr": 1e-2, "warmup_steps": 1, "dropout": 0.2, "gradient_accumulation_steps": 4},
    "data": {"batch_size": 4},
}
MESH = {"pp": 2, "fsdp": 2, "tp": 2}
# (steps, microbatches, sequences, positions + 1)
TOKENS = np.random.default_rng(0).integers(0, 64, (3, 4, 4, 33)).astype(np.int32)
# the programs run for a second: compile them with less effort
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# all devices in an order, such as [2,2,2]T(0,2,1)
ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"

Prepared = tuple[TrainProgram, jax.stages.Compiled]


def prepared(sizes: dict[str, int]) -> Prepared:
    """The training program on a mesh, and its compiled step."""
    config = parse_config(TINY, [f"mesh.{axis}={size}" for axis, size in sizes.items()])
    program = TrainProgram(Placement.of(config, jax.devices()[: math.prod(sizes.values())]), config)
    return program, lower_step(program, *TOKENS.shape[1:3]).compile(compiler_options=QUICKLY)


def trained(prepared: Prepared, tokens: np.ndarray) -> tuple[list[float], Any]:
    """The losses of the steps, and Adam's first moment after one step: the gradient times a number."""
    program, step = prepared
    random, shapes = np.random.default_rng(1), program.abstract_state.params
    # biases too: zeros, with which they begin, would hide a missing term
    params = jax.tree.map(lambda like: 0.1 * random.standard_normal(like.shape, np.float32), shapes)
    params = jax.device_put(params, program.state_shardings.params)
    state, losses, moments = program.begin(params, program.fresh_optimizer(params), {}), [], []
    for batch in tokens:
        state, metrics = step(state, Sequences(batch))
        losses.append(float(metrics["train/loss"]))
        moments.append(jax.device_get(state.opt_state["mu"]))
    return losses, moments[0]


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of two gradients, in units of the largest number of an array."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def executions(module: Module, computation: str, times: int = 1) -> Iterator[tuple[Instruction, int]]:
    """Each instruction of a program, and how often a device executes it in a step."""
    for one in module.computations[computation]:
        yield one, times
        repeats = times * (module.trips(one) or 1) if one.opcode == "while" else times
        for called in one.called:
            yield from executions(module, called, repeats)


def first_group(rest: str) -> list[int]:
    """The numbers of the devices in the first group of a collective. XLA writes groups in four ways."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", rest):
        return numbers_in(listed[1])
    if rows := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={ORDER}", rest):
        return ordered(rows[3], rows[4]).reshape(int(rows[1]), int(rows[2]))[0].tolist()
    if axes := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({ORDER}\))? \{{([^}}]*)\}}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes[1])}
        devices = ordered(axes[2] or str(math.prod(sizes.values())), axes[3]).reshape(tuple(sizes.values()))
        chosen = re.findall(r"'(\w+)'", axes[4])
        return devices[tuple(slice(None) if name in chosen else 0 for name in sizes)].flatten().tolist()
    raise ValueError(f"the groups of a collective are not known: {rest[:200]}")


def ordered(dims: str, order: str | None) -> np.ndarray:
    """The numbers of the devices in an order such as [2,2,2]T(0,2,1)."""
    numbers = np.arange(math.prod(numbers_in(dims))).reshape(numbers_in(dims))
    return numbers.transpose(numbers_in(order)) if order else numbers


def numbers_in(text: str) -> list[int]:
    """Of a list such as 0,2,1."""
    return [int(number) for number in text.split(",")]


def by_axis(hlo: str) -> dict[str, dict[str, list[int]]]:
    """How many collectives of each kind a device executes between the devices of an axis, and their bytes."""
    module, found = Module(hlo), defaultdict[str, dict[str, list[int]]](dict)
    for one, times in executions(module, module.entry):
        if one.kind:
            # the indices of the group's devices on each axis
            places = np.unravel_index(first_group(one.rest), tuple(MESH.values()))
            axes = " x ".join(axis for axis, index in zip(MESH, places, strict=True) if np.ptp(index))
            count, nbytes = found[axes].get(one.kind, [0, 0])
            found[axes][one.kind] = [count + times, nbytes + times * one.nbytes]
    return found


def main() -> None:
    """Train, compare and write."""
    one_device, mesh = prepared({"dp": 1}), prepared(MESH)
    ours, theirs = trained(mesh, TOKENS), trained(one_device, TOKENS)
    # one sequence of 16 is read twice
    wrong = TOKENS.copy()
    wrong[:, 3, 3] = wrong[:, 3, 2]
    mistaken = trained(one_device, wrong)
    found = {
        "losses": {"mesh": ours[0], "one device": theirs[0], "mistake": mistaken[0]},
        "gradients": {"mesh": difference(ours[1], theirs[1]), "mistake": difference(mistaken[1], theirs[1])},
        "collectives": by_axis(mesh[1].as_text()),
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stderr.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
