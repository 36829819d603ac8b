"""The flags that tests give XLA. With TESTS_XLA_FLAGS=default, programs are optimized as a user's."""

import importlib.metadata
import os
import platform

DEVICES = "--xla_force_host_platform_device_count"
# Tests compile much and compute little. With these flags a program for the CPU compiles in a third of the time; HLO
# passes, partitioning and collectives stay as they are.
_QUICK_COMPILE = {
    "--xla_backend_optimization_level": "0",
    "--xla_cpu_parallel_codegen_split_count": "1",
}
# XLA ends the process for a flag that it does not know: jaxlib 0.11 has no other emitters
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    _QUICK_COMPILE["--xla_cpu_use_fusion_emitters"] = "false"
# Without optimizations, the compiler fuses a product and a sum in some loops and not in others. Two programs then round
# differently, so the fused instruction is left out.
if platform.machine() in ("x86_64", "AMD64"):
    _QUICK_COMPILE["--xla_cpu_max_isa"] = "AVX"
if os.environ.get("TESTS_XLA_FLAGS") == "default":
    _QUICK_COMPILE.clear()


def cpu_flags(devices: int, given: str = "") -> str:
    """XLA_FLAGS for this number of CPU devices and a quick compile. A flag that is given wins."""
    flags = {DEVICES: str(devices), **_QUICK_COMPILE}
    return " ".join([*given.split(), *(f"{name}={value}" for name, value in flags.items() if name not in given)])
