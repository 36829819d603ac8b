"""The rates of a device in the closed form, fitted to what programs of libtpu reach by the compiler's own estimates."""

from typing import NamedTuple

from mesh_transformer import slices
from mesh_transformer.accelerators import Accelerator

MIB = 2**20


class Fit(NamedTuple):
    """What the programs of one generation of TPUs reach, by the compiler's estimates."""

    # of the peak, by the matrix products of the layers
    product_share: float
    # bytes of an activation that one core processes in a cycle, in one pass
    pass_bytes: float
    # cycles of a core for one logit of attention, forward and backward, while the logits are in its vector memory
    logit_cycles: float
    # bytes of the logits of one part of the queries that fit into the vector memory
    logit_room: float
    # the exposed share of the transfers of weights and gradients: libtpu overlaps the rest with products
    exposed: float = 1.0


FITTED = {
    "v3": Fit(0.93, 145, 0, 0),
    "v4": Fit(0.88, 135, 0, 0),
    "v5e": Fit(0.90, 141, 0.05, 48 * MIB, 0.55),
    "v5p": Fit(0.80, 145, 0, 0, 0.4),
    "v6e": Fit(0.80, 220, 0.05, 48 * MIB),
}
"""From the step of GPT-J-6B on v3-8, v5e-8 and v6e-8 (fsdp 4, tp 2), v4-8 (fsdp 2, tp 2), v3-256, v5p-8 and v5p-256
(fsdp 16; tp 2; tp 4), and for the room on v5e-8 (fsdp 8). v5e and v6e have 128 MiB of vector memory. v3 and v4 have 16
MiB, in which logits never stay."""
LIKE = {"v2": "v3", "v7x": "v6e"}
"""The fitted generation that stands in for one without compiled programs."""
# of the peak in large products of an H200, 750 of 989 TFLOP/s; of the memory's rate in a pass, which is not measured
GPU_PRODUCT_SHARE, GPU_PASS_SHARE = 0.76, 0.8


class DeviceRates(NamedTuple):
    """The rates of one device."""

    # FLOP/s of matrix products
    products: float
    # bytes/s of a pass over an activation, and of the memory
    passes: float
    memory: float
    # the exposed share of the transfers of weights and gradients
    exposed: float = 1.0
    # seconds of a logit of attention in vector memory, and bytes of logits that fit into it
    logit: float = 0.0
    logit_room: float = 0.0

    @classmethod
    def of(cls, accelerator: Accelerator) -> "DeviceRates":
        peak, memory = 1e12 * accelerator.peak_tflops, 1e9 * accelerator.memory_gb_s
        if not accelerator.is_tpu:
            return cls(GPU_PRODUCT_SHARE * peak, GPU_PASS_SHARE * memory, memory)
        fit = FITTED[LIKE.get(accelerator.name, accelerator.name)]
        generation = next(tpu for tpu in slices.GENERATIONS if tpu.name == accelerator.name)
        cores = generation.cores_per_chip / generation.devices_per_chip
        cycles = 1e9 * accelerator.clock_ghz * cores
        logit = fit.logit_cycles / cycles
        return cls(fit.product_share * peak, fit.pass_bytes * cycles, memory, fit.exposed, logit, fit.logit_room)
