"""GPUs as targets of a compilation, with none attached. JAX's CUDA plugin describes them; it needs no CUDA library.

The properties are what a CUDA device reports (table of compute capabilities in NVIDIA's CUDA programming guide, and the
white papers of the architectures).
"""

import importlib.util
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from mesh_transformer.accelerators import ACCELERATORS, Accelerator
from mesh_transformer.errors import UserError

# by compute capability: shared memory of a multiprocessor, and the largest of a block, bytes; threads of a
# multiprocessor; float32 units of a multiprocessor
_CAPABILITIES = {
    (7, 5): (65536, 65536, 1024, 64),
    (8, 0): (167936, 166912, 2048, 64),
    (8, 6): (102400, 101376, 1536, 128),
    (8, 9): (102400, 101376, 1536, 128),
    (9, 0): (233472, 232448, 2048, 128),
    (12, 0): (102400, 101376, 1536, 128),
}
# by GPU: compute capability, multiprocessors, L2 cache (bytes), clock (GHz)
_PROPERTIES = {
    "a100": ((8, 0), 108, 40 << 20, 1.41),
    "h100": ((9, 0), 132, 50 << 20, 1.98),
    "h200": ((9, 0), 132, 60 << 20, 1.98),
    "t4": ((7, 5), 40, 4 << 20, 1.59),
    "l4": ((8, 9), 58, 48 << 20, 2.04),
    "a10": ((8, 6), 72, 6 << 20, 1.70),
    "rtx3090": ((8, 6), 82, 6 << 20, 1.70),
    "rtx4090": ((8, 9), 128, 72 << 20, 2.52),
    "rtx5090": ((12, 0), 170, 96 << 20, 2.41),
    "rtx6000ada": ((8, 9), 142, 96 << 20, 2.51),
}
COMPILE_OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""Without a GPU, XLA cannot choose between kernels by their time."""


def missing_compiler(name: str) -> str | None:
    """See `Target.missing_compiler`."""
    if name not in _PROPERTIES:
        return f"a compiler for {name}, which JAX has only where one is attached"
    if any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return None
    return "JAX's CUDA plugin (pip install -e '.[gpu-target]' in an environment of its own)"


def gpu_devices(name: str) -> Sequence[jax.Device]:
    """One GPU of the table of accelerators as a target of a compilation.

    Raises:
        UserError: as `missing_compiler`.
    """
    if missing := missing_compiler(name):
        raise UserError(f"compiling for {name} needs {missing}")
    # JAX registers its plugins when it lists the devices
    jax.devices("cpu")
    (device,) = topologies.get_topology_desc(
        name, "cuda", target_config=_description(ACCELERATORS[name]), topology="1x1x1"
    ).devices
    return [device]


def compute_capability(name: str) -> str:
    """The compute capability of a GPU, such as 9.0; empty if it is unknown."""
    return "{}.{}".format(*_PROPERTIES[name][0]) if name in _PROPERTIES else ""


def _description(gpu: Accelerator) -> str:
    """A `stream_executor.GpuTargetConfigProto` in text."""
    capability, cores, cache, clock = _PROPERTIES[gpu.name]
    (major, minor), (shared, of_block, threads, units) = capability, _CAPABILITIES[capability]
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
          shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {of_block}
          core_count: {cores} fpus_per_core: {units} l2_cache_size: {cache}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {round(1e9 * gpu.memory_gb_s)} device_memory_size: {round(gpu.usable_gib * 2**30)}
          clock_rate_ghz: {clock} registers_per_core_limit: 65536 registers_per_block_limit: 65536
          cuda_compute_capability {{ major: {major} minor: {minor} }}
        }}
        runtime_version {{ major: 12 minor: 8 }} dnn_version_info {{ major: 9 minor: 10 }}
        platform_name: "CUDA" device_description_str: "{gpu.device_kind}" """
