"""Variables of the environment that change what JAX and the commands do, and that people forget."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from mesh_transformer.doctor import accelerators
from mesh_transformer.doctor.findings import Finding, ok, warning

_YES, _NO, _SET = r"(?i)1|true|yes|on", r"(?i)0|false|no|off", r"(?s).+"
# the variable, the values that surprise, what they do
_SETTINGS = (
    ("JAX_PLATFORM_NAME", _SET, "JAX uses this platform only; JAX_PLATFORMS is the name of today"),
    ("XLA_FLAGS", r".*--xla_force_host_platform_device_count=([2-9]|1\d).*", "the CPU counts as several devices"),
    ("XLA_FLAGS", r".*--xla_dump_to=.*", "XLA writes files about each program that it compiles"),
    ("XLA_PYTHON_CLIENT_MEM_FRACTION", _SET, "programs get this share of a GPU's memory; without it, 0.75"),
    ("XLA_PYTHON_CLIENT_PREALLOCATE", _NO, "JAX takes the memory of a GPU bit by bit, in which it may get lost"),
    ("XLA_PYTHON_CLIENT_ALLOCATOR", r"platform", "each array is allocated by the driver, which is slow"),
    ("CUDA_VISIBLE_DEVICES", r".*", "JAX sees only these GPUs"),
    ("TPU_VISIBLE_CHIPS", r".*", "JAX sees only these TPU chips"),
    ("TPU_VISIBLE_DEVICES", r".*", "JAX sees only these TPU chips"),
    # github.com/jax-ml/jax/issues/17497
    ("LD_LIBRARY_PATH", r"(?i).*(cuda|cudnn|nvidia).*", "CUDA libraries there replace those of the packages"),
    ("JAX_ENABLE_X64", _YES, "numbers without a type have 64 bits: arrays take twice the memory"),
    ("JAX_DISABLE_JIT", _YES, "nothing is compiled: a step takes minutes"),
    ("JAX_DEBUG_NANS", _YES, "JAX looks at each result, which is slow"),
    ("JAX_ENABLE_COMPILATION_CACHE", _NO, "each start compiles all programs again"),
    ("JAX_COORDINATOR_ADDRESS", _SET, "train waits for the other processes of a job, and sample refuses"),
    ("HF_HUB_OFFLINE", _YES, "hf:// names are looked for only in the cache"),
)


def settings() -> Iterator[Finding]:
    """The variables that are set to values that surprise."""
    findings = list(_surprises())
    yield from findings or [ok("no variable changes what JAX does")]


def _surprises() -> Iterator[Finding]:
    if os.environ.get("JAX_PLATFORMS") == "cpu" and (accelerators.tpus() or accelerators.gpus()):
        yield warning("JAX_PLATFORMS=cpu: JAX leaves out the TPU or the GPU of this machine", "unset JAX_PLATFORMS")
    for name, pattern, effect in _SETTINGS:
        value = os.environ.get(name)
        if value is not None and re.fullmatch(pattern, value):
            yield warning(f"{name}={value[:80]}: {effect}", f"unset {name}")
