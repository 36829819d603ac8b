"""Where a run takes place: the mesh, the microbatch and the recomputation with which a model fits, and its speed."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from mesh_transformer import host_memory, platforms, slices
from mesh_transformer.accelerators import ACCELERATORS, GPUS
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
from mesh_transformer.estimate.search import Candidate, candidates
from mesh_transformer.estimate.target import Target, gpu_target, tpu_target
from mesh_transformer.logs import log
from mesh_transformer.runtime.new import measure
from mesh_transformer.runtime.new.answers import CPU

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

    def larger(self) -> Iterator["Machine"]:
        """Larger machines of the same kind, smallest first. They compile nothing."""

    def quick(self) -> "Machine":
        """This machine, of which nothing is compiled."""


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
    """A TPU slice or a GPU, which need not be attached.

    Args:
        compiles: whether a compiler, if it is installed, judges what fits.
    """

    target: Target
    compiles: bool = True

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

    def larger(self) -> Iterator[Machine]:
        accelerator = self.target.accelerator
        if not accelerator.is_tpu:
            gpus = sorted((ACCELERATORS[name] for name in GPUS), key=lambda gpu: gpu.usable_gib)
            names = [gpu.name for gpu in gpus if gpu.usable_gib > accelerator.usable_gib]
        else:
            generation = next(each for each in slices.GENERATIONS if each.name == accelerator.name)
            kinds = (slices.parse(name) for name in generation.types)
            # the common name: v5e-16, not v5litepod-16
            names = [f"{generation.name}-{k.name.rpartition('-')[2]}" for k in kinds if k.devices > self.devices]
        return (find(name).quick() for name in names)

    def quick(self) -> Machine:
        return replace(self, compiles=False)

    def _predicted(self, candidate: Candidate) -> Prediction:
        """The prediction of the compiler if it is installed, else of the closed form."""
        if not self.compiles or self.target.missing_compiler:
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
    # by model and microbatch: s
    _measured: dict[str, float] = field(default_factory=dict, compare=False)

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
                source = f"a few real steps on this machine{measure.other_load()}"
                return Placed(values, sequences * self._seconds_per_sequence(config), gib, usable, source)
        return None

    def larger(self) -> Iterator[Machine]:
        return iter(())

    def quick(self) -> Machine:
        return self

    def _seconds_per_sequence(self, config: Config) -> float:
        key = f"{config.model.model_dump_json()} {config.seq} {config.data.batch_size}"
        if key not in self._measured:
            log.info("running a few steps of a %s model of %d layers", config.model.family, config.model.layers)
            self._measured[key] = measure.seconds_per_sequence(config, self.flops)
        return self._measured[key]


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


def _measured_flops() -> float:
    """The rate of numpy's product of float32 matrices, FLOP/s: the best of several."""
    matrix = np.ones((_ROWS, _ROWS), np.float32)
    fastest = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        matrix @ matrix
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * _ROWS**3 / fastest
