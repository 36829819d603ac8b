"""GPUs as targets of a compilation, with none attached. JAX's CUDA plugin describes them; it needs no CUDA library.

The properties are what a CUDA device reports (NVIDIA's tuning guides for Ampere and Hopper).
"""

import importlib.util
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from mesh_transformer.accelerators import ACCELERATORS, Accelerator
from mesh_transformer.errors import UserError

# by compute capability: shared memory of a multiprocessor, and the largest of a block, bytes
_SHARED_MEMORY = {8: (167936, 166912), 9: (233472, 232448)}
# by GPU: compute capability, multiprocessors, L2 cache (bytes), clock (GHz)
_PROPERTIES = {"a100": (8, 108, 41943040, 1.41), "h100": (9, 132, 52428800, 1.98), "h200": (9, 132, 62914560, 1.98)}
COMPILE_OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""Without a GPU, XLA cannot choose between kernels by their time."""


def gpu_devices(name: str) -> Sequence[jax.Device]:
    """One GPU of the table of accelerators as a target of a compilation.

    Raises:
        UserError: JAX's CUDA plugin is not installed.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise UserError(
            "compiling for GPUs needs JAX's CUDA plugin: pip install -e '.[gpu-target]' in an environment of its own"
        )
    # JAX registers its plugins when it lists the devices
    jax.devices("cpu")
    (device,) = topologies.get_topology_desc(
        name, "cuda", target_config=_description(ACCELERATORS[name]), topology="1x1x1"
    ).devices
    return [device]


def compute_capability(name: str) -> str:
    """The compute capability of a GPU, such as 9.0; empty if it is unknown."""
    return f"{_PROPERTIES[name][0]}.0" if name in _PROPERTIES else ""


def _description(gpu: Accelerator) -> str:
    """A `stream_executor.GpuTargetConfigProto` in text."""
    capability, cores, cache, clock = _PROPERTIES[gpu.name]
    shared, of_block = _SHARED_MEMORY[capability]
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {of_block}
          core_count: {cores} fpus_per_core: {64 if capability == 8 else 128} l2_cache_size: {cache}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {round(1e9 * gpu.memory_gb_s)} device_memory_size: {round(gpu.usable_gib * 2**30)}
          clock_rate_ghz: {clock} registers_per_core_limit: 65536 registers_per_block_limit: 65536
          cuda_compute_capability {{ major: {capability} }}
        }}
        runtime_version {{ major: 12 minor: 8 }} dnn_version_info {{ major: 9 minor: 10 }}
        platform_name: "CUDA" device_description_str: "{gpu.device_kind}" """
