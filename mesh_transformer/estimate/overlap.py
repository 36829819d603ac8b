"""The value of `mesh.overlap_tp` where it is "auto": what the closed form estimates to be faster."""

from collections.abc import Sequence

import jax

from mesh_transformer.accelerators import Accelerator, of_device
from mesh_transformer.config import Config
from mesh_transformer.estimate.closed_form import estimate


def resolve(config: Config, n_devices: int, accelerator: Accelerator | None) -> Config:
    """The config with "auto" replaced.

    It is false without `mesh.shard_activations`, without tensor parallelism, and on devices without known rates: CPUs
    and several GPUs.

    Raises:
        UserError: the mesh does not fit the devices, or does not divide a size.
    """
    if config.mesh.overlap_tp != "auto":
        return config
    either = [_with(config, overlap_tp) for overlap_tp in (False, True)]
    split = config.mesh.shard_activations and config.mesh.tp > 1
    if not split or accelerator is None or not accelerator.is_tpu:
        return either[0]
    return min(either, key=lambda candidate: estimate(candidate, n_devices, accelerator).seconds)


def resolve_for(config: Config, devices: Sequence[jax.Device]) -> Config:
    """`resolve` for these devices, which need not be attached."""
    return resolve(config, len(devices), of_device(devices[0].device_kind))


def _with(config: Config, overlap_tp: bool) -> Config:
    mesh = config.mesh.model_copy(update={"overlap_tp": overlap_tp})
    return config.model_copy(update={"mesh": mesh})
