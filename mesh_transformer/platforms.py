"""What differs between CPU, GPU and TPU: precision, recomputation, and how processes find each other."""

from __future__ import annotations

import os

import jax

from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError

_ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start_distributed() -> None:
    """Join the other processes of the job, if the environment names a coordinator.

    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID; without them this
    process runs alone. CPUs talk over gloo. Must run before the first use of a device.

    Raises:
        UserError: only some of the variables are set, or one is not a number.
    """
    values = {name: os.environ.get(name) for name in _ENVIRONMENT}
    if values["JAX_COORDINATOR_ADDRESS"] is None:
        return
    try:
        count, index = (int(values[name] or "") for name in _ENVIRONMENT[1:])
    except ValueError as error:
        raise UserError(
            f"a job of several processes needs {', '.join(_ENVIRONMENT)}, the last two as numbers; found {values}"
        ) from error
    if "cpu" in os.environ.get("JAX_PLATFORMS", ""):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(values["JAX_COORDINATOR_ADDRESS"], count, index)


def resolve(model: ModelConfig, platform: str) -> ModelConfig:
    """The config with each "auto" replaced by what suits `platform` (cpu, gpu or tpu)."""
    cpu = platform == "cpu"
    changes: dict[str, str | int] = {}
    if model.compute_dtype == "auto":
        changes["compute_dtype"] = "float32" if cpu else "bfloat16"
    if model.remat == "auto":
        changes["remat"] = "none" if cpu else "full"
    if model.logits_mib == "auto":
        changes["logits_mib"] = 128 if cpu else 1024
    return model.model_copy(update=changes)
