"""The table of accelerators: the rates and the usable memory of one JAX device of each kind.

Sources: for TPUs Google's page on each generation (cloud.google.com/tpu/docs/v2 ... v6e, tpu7x), and for the usable
memory the compiler of libtpu 0.0.42, which names it when it refuses a program. The network between slices is the "data
center network bandwidth" of these pages; the pages of v2, v3 and v4 do not give it. A torus of two dimensions is closed
in a whole pod. A torus of three dimensions is closed in slices whose sides are multiples of 4. A v2, v3 or v7x chip is
two JAX devices, which share its links. The source of a GPU stands above its row. Its rate is that of bfloat16 with sums
in float32, without sparsity. Its usable memory is MEMORY_SHARE of what the driver leaves; of the large cards, more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Accelerator:
    """One kind of JAX device."""

    # the generation of a TPU as in `slices`, or the name of a GPU
    name: str
    # how `jax.Device.device_kind` of a TPU begins; of a GPU, the whole name, because A10 and A100 begin alike
    device_kind: str
    # products of bfloat16, TFLOP/s
    peak_tflops: float
    # GB/s between the memory and the device
    memory_gb_s: float
    # memory that a program can use, GiB
    usable_gib: float
    # clock of a TPU core, GHz; 0: a GPU
    clock_ghz: float = 0.0
    # one direction of a link between neighbouring TPU chips, GB/s; of a GPU, half of one direction of its NVLink, of
    # AMD's Infinity Fabric, or of PCIe
    link_gb_s: float = 0.0
    # JAX devices of a chip
    devices_per_chip: int = 1
    # dimensions of the torus of chips
    torus: int = 2
    # the fewest chips whose torus is closed: the links of the last chip of a row lead to the first one
    closed_torus: int = 0
    # one direction of the share that a device has of the network between slices, GB/s; 0: not known
    dcn_gb_s: float = 0.0

    @property
    def is_tpu(self) -> bool:
        """Whether it is a TPU."""
        return self.clock_ghz > 0


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("v2", "TPU v2", 22.9, 350, 7.48, 0.70, 62, 2, closed_torus=256),
        Accelerator("v3", "TPU v3", 61.5, 450, 15.48, 0.94, 82, 2, closed_torus=1024),
        Accelerator("v4", "TPU v4", 275, 1228, 30.75, 1.05, 45, torus=3, closed_torus=64),
        Accelerator("v5e", "TPU v5 lite", 197, 819, 15.75, 1.5, 45, closed_torus=256, dcn_gb_s=3.125),
        Accelerator("v5p", "TPU v5", 459, 2765, 95.74, 1.75, 90, torus=3, closed_torus=64, dcn_gb_s=6.25),
        Accelerator("v6e", "TPU v6 lite", 918, 1640, 31.25, 1.75, 90, closed_torus=256, dcn_gb_s=12.5),
        Accelerator("v7x", "TPU7x", 1153, 3690, 94.75, 1.75, 90, 2, torus=3, closed_torus=64, dcn_gb_s=6.25),
        # data sheets: A100 SXM 80 GB, H100 SXM, H200
        Accelerator("a100", "NVIDIA A100-SXM4-80GB", 312, 2039, 78.0, link_gb_s=150),
        Accelerator("h100", "NVIDIA H100 80GB HBM3", 989, 3350, 78.0, link_gb_s=225),
        Accelerator("h200", "NVIDIA H200", 989, 4800, 139.0, link_gb_s=225),
        # data sheet of T4. Turing has no units for bfloat16: XLA computes in float32
        Accelerator("t4", "Tesla T4", 8.1, 320, 13.8, link_gb_s=8),
        # data sheet of L4: 242 TFLOP/s with sparsity
        Accelerator("l4", "NVIDIA L4", 121, 300, 20.9, link_gb_s=16),
        # data sheet of A10
        Accelerator("a10", "NVIDIA A10", 125, 600, 20.9, link_gb_s=16),
        # GA102 white paper, appendix A
        Accelerator("rtx3090", "NVIDIA GeForce RTX 3090", 71, 936, 22.5, link_gb_s=16),
        # Ada white paper, appendix A
        Accelerator("rtx4090", "NVIDIA GeForce RTX 4090", 165.2, 1008, 22.4, link_gb_s=16),
        # RTX Blackwell white paper, appendix A
        Accelerator("rtx5090", "NVIDIA GeForce RTX 5090", 209.5, 1792, 29.8, link_gb_s=32),
        # data sheet of RTX 6000 Ada: a quarter of 1,457 TFLOP/s, which are of 8 bits with sparsity
        Accelerator("rtx6000ada", "NVIDIA RTX 6000 Ada Generation", 364.2, 960, 45.1, link_gb_s=16),
        # data sheet of AMD Instinct MI300X. JAX runs on it with ROCm (pip install "jax[rocm7-local]")
        Accelerator("mi300x", "AMD Instinct MI300X", 1307.4, 5300, 182.0, link_gb_s=224),
    )
}
"""By name. The device kind of v5p is the beginning of v5e's: `of_device` takes the longest that matches."""


MEMORY_SHARE = "0.95"
"""XLA_PYTHON_CLIENT_MEM_FRACTION with which a program gets the usable memory of a GPU. By default, JAX takes 0.75."""
GPUS = tuple(name for name, accelerator in ACCELERATORS.items() if not accelerator.is_tpu)


def gpu_name(text: str) -> str | None:
    """The name in GPUS of a GPU as people or its driver write it, such as `RTX 4090`, `4090` or `Tesla T4`; None: it is
    not in the table."""

    def plain(name: str) -> str:
        return re.sub(r"nvidia|amd|geforce|instinct|tesla|generation|[\s_-]", "", name.lower())

    names = {name: (name, name.removeprefix("rtx"), plain(ACCELERATORS[name].device_kind)) for name in GPUS}
    return next((name for name, spellings in names.items() if plain(text) in spellings), None)


def of_device(device_kind: str) -> Accelerator | None:
    """The accelerator of a `jax.Device.device_kind`; None for a device that is not in the table, such as a CPU."""
    matches = [
        accelerator
        for accelerator in ACCELERATORS.values()
        if device_kind == accelerator.device_kind
        or (accelerator.is_tpu and device_kind.startswith(accelerator.device_kind))
    ]
    return max(matches, key=lambda accelerator: len(accelerator.device_kind), default=None)


@dataclass(frozen=True)
class CompileTarget:
    """The kind of the devices for which a program is compiled. They need not be attached."""

    # cpu, gpu or tpu
    platform: str
    # of a TPU its generation such as v5e, of a GPU its compute capability such as 9.0; "": not known
    generation: str = ""

    @classmethod
    def of(cls, device: jax.Device) -> CompileTarget:
        """The kind of a JAX device, or of the target of a compilation."""
        known = of_device(device.device_kind)
        if device.platform == "tpu":
            return cls("tpu", "" if known is None else known.name)
        return cls(device.platform, str(getattr(device, "compute_capability", "")))
