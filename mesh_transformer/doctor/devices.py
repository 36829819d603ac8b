"""The devices that JAX opens. A child process asks for them: a driver may hang, and a TPU may be held by another
process."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator

from mesh_transformer import environment
from mesh_transformer.doctor import accelerators, child, packages
from mesh_transformer.doctor.findings import Finding, ok, problem, warning
from mesh_transformer.errors import byte_size

_PROGRAM = """
import json, jax
def memory(device):
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except Exception:
        return None
found = [[device.platform, device.device_kind, memory(device)] for device in jax.local_devices()]
print("\\n" + json.dumps({"devices": found}))
"""
# the child must not take the memory that a program of the same GPU will want
_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# a pattern of the output, and the mend; the first two of xla/stream_executor/tpu/tpu_initializer_framework_helper.cc
_FAILURES = (
    (r"TPU is already in use by process with pid (\d+)", r"ps -fp \1 shows the process: end it, or wait for its end"),
    (
        r"libtpu multi-process lockfile|TPU is already in use by another process",
        "sudo lsof -w /dev/accel* /dev/vfio/* shows the processes of the TPU: end them; else rm /tmp/libtpu_lockfile",
    ),
    (r"Unknown flags? in XLA_FLAGS", "unset XLA_FLAGS, or take out the flags that this jaxlib does not know"),
    (r"Mismatched PJRT plugin", "install the plugin of this JAX again: see the lines about packages"),
    (r"ModuleNotFoundError|ImportError", "install the packages again: see the lines about packages"),
)

# names in JAX_PLATFORMS, and the extra of pyproject.toml that brings the platform
_EXTRAS = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}


def devices(limit_s: float) -> Iterator[Finding]:
    """The devices of this machine as JAX sees them, with the memory that a program can use.

    Args:
        limit_s: seconds to wait for them.
    """
    if importlib.util.find_spec("jax") is None:
        yield warning("nobody can be asked: JAX is not installed", environment.way_in())
        return
    ended = child.run([sys.executable, "-c", _PROGRAM], limit_s, {**os.environ, **_ENVIRONMENT})
    if ended.code is None:
        yield problem(f"JAX did not open its devices in {limit_s:g} s", _why_it_waits())
    elif ended.code != 0:
        yield _failure(ended)
    else:
        jax_devices = [tuple(device) for device in json.loads(ended.output.strip().splitlines()[-1])["devices"]]
        for (platform, kind, limit), count in Counter(jax_devices).items():
            size = f", {byte_size(limit)} for programs on each" if limit else ""
            yield ok(f"{count} x {platform if kind == platform else f'{platform} ({kind})'}{size}")
        yield from _left_out({device[0] for device in jax_devices}, ended)


def _why_it_waits() -> str:
    if accelerators.tpus():
        return (
            "on a TPU of several hosts, run it on all hosts at the same time (tpu run), because they wait for each "
            "other; else look for the process that holds the chips: sudo lsof -w /dev/accel* /dev/vfio/*"
        )
    return "wait longer (--timeout 300); if it does not end then, the driver hangs: restart the machine"


def _failure(ended: child.Ended) -> Finding:
    printed = ended.output + ended.errors
    if ended.code is not None and ended.code < 0:
        reason = f"it was ended by signal {-ended.code}: {ended.reason}"
    else:
        reason = ended.reason
    for pattern, mend in _FAILURES:
        if match := re.search(pattern, printed):
            return problem(f"JAX fails: {reason}", match.expand(mend))
    asked = os.environ.get("JAX_PLATFORMS", "")
    if asked:
        extra = next((extra for name, extra in _EXTRAS.items() if name in asked), "")
        mend = f"unset JAX_PLATFORMS, or {packages.install(extra)}" if extra else "unset JAX_PLATFORMS"
        return problem(f"JAX fails with JAX_PLATFORMS={asked}: {reason}", mend)
    return problem(f"JAX fails: {reason}", "python -c 'import jax; jax.devices()' prints all of the error")


def _left_out(platforms: set[str], ended: child.Ended) -> Iterator[Finding]:
    """TPU chips and GPUs that JAX does not use, though no variable selects a platform."""
    if os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_PLATFORM_NAME"):
        return
    reason = f": {ended.errors.strip().splitlines()[-1][:300]}" if ended.errors.strip() else ""
    if accelerators.tpus() and "tpu" not in platforms:
        yield problem(f"this machine has TPU chips, but JAX does not use them{reason}", packages.install("tpu"))
    if accelerators.gpus() and not platforms & {"gpu", "cuda"}:
        yield problem(f"this machine has an NVIDIA GPU, but JAX does not use it{reason}", packages.install("cuda"))
