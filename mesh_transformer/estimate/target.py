"""The devices for which a program is compiled: a TPU slice or a GPU. They need not be attached."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from mesh_transformer import slices
from mesh_transformer.accelerators import ACCELERATORS, GPUS, Accelerator, gpu_name
from mesh_transformer.errors import UserError, did_you_mean
from mesh_transformer.estimate import gpus, tpus


@dataclass(frozen=True)
class Target:
    """A slice, several slices or a GPU.

    Args:
        name: the type of the slice, such as v3-8 or 2xv5e-16, or the name of the GPU.
        n_devices: JAX devices.
        chips: TPU chips or GPUs, the unit of the price.
        slices: their number.
    """

    name: str
    accelerator: Accelerator
    n_devices: int
    chips: int
    slices: int = 1

    @property
    def missing_compiler(self) -> str | None:
        """The compiler for it that is not installed, and how to get it; None: it is installed."""
        return tpus.missing_compiler() if self.accelerator.is_tpu else gpus.missing_compiler(self.name)

    def devices(self) -> Sequence[jax.Device]:
        """The devices as targets of a compilation.

        Raises:
            UserError: the compiler for them is not installed.
        """
        return tpus.slice_devices(self.name) if self.accelerator.is_tpu else gpus.gpu_devices(self.name)


def tpu_target(name: str) -> Target:
    """The slice of a type such as v3-8 or v5e-16, or several slices such as 2xv5e-16.

    Raises:
        UserError: the type is unknown.
    """
    count, kind = slices.several(name)
    accelerator = ACCELERATORS[kind.generation.name]
    return Target(name.strip().lower(), accelerator, count * kind.devices, count * kind.chips, count)


def gpu_target(name: str) -> Target:
    """One GPU of the table of accelerators, as `gpu_name` reads its name.

    Raises:
        UserError: it is not in the table.
    """
    known = gpu_name(name)
    if known is None:
        raise UserError(f"unknown GPU {name!r}{did_you_mean(name, GPUS)}: expected one of {', '.join(GPUS)}")
    return Target(known, ACCELERATORS[known], 1, 1)
