"""Where a run takes place: the mesh, the microbatch and the recomputation with which a model fits, and its speed."""

import importlib.util
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from mesh_transformer import host_memory, platforms
from mesh_transformer.config import Config, parse_config
from mesh_transformer.estimate.closed_form import GIB, step_gib
from mesh_transformer.estimate.prediction import (
    FORMULA,
    FORMULA_MEMORY,
    Prediction,
    estimate_training,
    predict_training,
)
from mesh_transformer.estimate.programs import default_folder
from mesh_transformer.estimate.search import Candidate, candidates, remedies
from mesh_transformer.estimate.target import Target, gpu_target, tpu_target
from mesh_transformer.estimate.tpus import has_libtpu
from mesh_transformer.logs import log
from mesh_transformer.runtime.new.answers import CPU
from mesh_transformer.spec.flops import flops_per_token

FORMULA_SOURCE = "the closed form of preflight"
Grouped = dict[str, dict[str, Any]]
# model FLOPs utilization that hardly any run exceeds: where the search for a size begins
_BEST_MFU = 0.6
# The FLOP/s of a training step on a CPU as a share of numpy's float32 matrix product: 0.3 to 0.7 in runs of
# configs/tiny_shakespeare.json. And the rows of the matrices.
_CPU_SHARE, _ROWS = 0.3, 1024
# the most memory that XLA allocated on a CPU, as a multiple of the closed form (docs/runs.md)
_CPU_MEMORY_ERROR = 1.5
# programs to compile until one of them fits
_MOST_COMPILED = 4


class Placed(NamedTuple):
    """A config that fits.

    Args:
        grouped: the config with the mesh, the microbatch and the recomputation.
        peak_gib: memory of a device, or of the whole machine if that is a CPU.
        source: the formula or program that predicts time and memory.
    """

    grouped: Grouped
    step_s: float
    peak_gib: float
    usable_gib: float
    source: str


class Machine(Protocol):
    """A slice, a GPU or this CPU."""

    @property
    def name(self) -> str:
        """The name in the answer."""

    @property
    def chips(self) -> int:
        """The number of chips that are paid for."""

    @property
    def devices(self) -> int:
        """The number of JAX devices."""

    @property
    def flops(self) -> float:
        """The rate that hardly any run exceeds, FLOP/s."""

    def place(self, grouped: Grouped) -> Placed | None:
        """The fastest mesh, microbatch and recomputation for a config whose data.batch_size is the global batch; None:
        nothing fits."""

    def remedies(self, grouped: Grouped) -> list[str]:
        """The changes with which a config would fit, in words."""


def find(name: str) -> Machine:
    """The machine of an answer.

    Raises:
        UserError: the name is unknown.
    """
    if name == CPU:
        return Cpu(_measured_flops())
    return Accelerated(tpu_target(name) if "-" in name else gpu_target(name))


@dataclass(frozen=True)
class Accelerated:
    """A TPU slice or a GPU, which need not be attached."""

    target: Target

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def chips(self) -> int:
        return self.target.chips

    @property
    def devices(self) -> int:
        return self.target.n_devices

    @property
    def flops(self) -> float:
        return _BEST_MFU * 1e12 * self.target.accelerator.peak_tflops * self.devices

    def place(self, grouped: Grouped) -> Placed | None:
        accelerator = self.target.accelerator
        every = candidates(parse_config(grouped), self.devices, accelerator)
        every.sort(key=lambda candidate: (candidate.estimate.seconds, len(candidate.overrides)))
        limit = accelerator.usable_gib
        fitting = [candidate for candidate in every if candidate.estimate.gib <= limit]
        # a margin for the error of the formula
        sure = [candidate for candidate in fitting if candidate.estimate.gib * (1 + FORMULA_MEMORY) <= limit]
        for candidate in (sure or fitting)[:_MOST_COMPILED]:
            prediction = self._predicted(candidate)
            if prediction.fits and prediction.step_s is not None and prediction.peak_gib is not None:
                source = FORMULA_SOURCE if prediction.estimate == FORMULA else "the compiled program"
                values = _with_values(grouped, candidate.config)
                return Placed(values, prediction.step_s, prediction.peak_gib, prediction.usable_gib, source)
        return None

    def remedies(self, grouped: Grouped) -> list[str]:
        return remedies(parse_config(grouped), self.devices, self.target.accelerator)

    def _predicted(self, candidate: Candidate) -> Prediction:
        """The prediction of the compiler if it is installed, else of the closed form."""
        if not _compiles(self.target):
            return estimate_training(candidate.config, self.target, candidate.overrides)
        return predict_training(
            candidate.config,
            self.target,
            candidate.overrides,
            default_folder(),
            lambda program, mesh: log.info("compiling %s for %s", program, self.name),
        )


@dataclass(frozen=True)
class Cpu:
    """This machine without an accelerator. `product_flops`: the rate of a product of matrices, FLOP/s."""

    product_flops: float
    name: str = CPU
    chips: int = 1
    devices: int = 1

    @property
    def flops(self) -> float:
        return _CPU_SHARE * self.product_flops

    def place(self, grouped: Grouped) -> Placed | None:
        left = host_memory.available()
        usable = float("inf") if left is None else left.available / GIB
        sequences = grouped["data"]["batch_size"]
        for parts in (1 << power for power in range(sequences.bit_length())):
            if sequences % parts:
                break
            values = {
                **grouped,
                "data": {**grouped["data"], "batch_size": sequences // parts},
                "optimizer": {**grouped["optimizer"], "gradient_accumulation_steps": parts},
            }
            config = parse_config(values)
            resolved = config.model_copy(update={"compute": platforms.resolve(config.compute, CPU)})
            gib = _CPU_MEMORY_ERROR * sum(step_gib(resolved, self.devices).values())
            if gib <= usable:
                return Placed(
                    values, self._seconds(config, sequences), gib, usable, "the rate of a product of matrices"
                )
        return None

    def remedies(self, grouped: Grouped) -> list[str]:
        return ["more memory"]

    def _seconds(self, config: Config, sequences: int) -> float:
        return sequences * config.seq * flops_per_token(config.decoder, config.seq) / self.flops


def _with_values(grouped: Grouped, config: Config) -> Grouped:
    """`grouped` with the values of `config` in the fields that a search changes."""
    mesh = {axis: size for axis, size in config.mesh.given.items() if size > 1 and axis != "dp"}
    shard = {"shard_activations": True} if config.mesh.shard_activations else {}
    return {
        **grouped,
        "mesh": {**mesh, **shard},
        "compute": {"remat": config.compute.remat},
        "optimizer": {
            **grouped["optimizer"],
            "gradient_accumulation_steps": config.optimizer.gradient_accumulation_steps,
        },
        "data": {**grouped["data"], "batch_size": config.data.batch_size},
    }


def _compiles(target: Target) -> bool:
    """Whether the compiler for a target is installed."""
    if target.accelerator.is_tpu:
        return has_libtpu()
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def _measured_flops() -> float:
    """The rate of numpy's product of float32 matrices, FLOP/s: the best of several."""
    matrix = np.ones((_ROWS, _ROWS), np.float32)
    fastest = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        matrix @ matrix
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * _ROWS**3 / fastest
