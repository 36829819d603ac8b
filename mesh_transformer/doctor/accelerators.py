"""NVIDIA GPUs with their driver, and TPU chips: what the machine has, without JAX."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mesh_transformer.doctor import child, packages
from mesh_transformer.doctor.findings import Finding, ok, problem, warning
from mesh_transformer.errors import plural

# the oldest driver of each CUDA: docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html (read in
# November 2026)
OLDEST_DRIVER = {12: 525, 13: 580}
# CUDA 13 has no code for GPUs before Turing: release notes of CUDA 13.0, "Deprecated Architectures"
OLDEST_CAPABILITY = {13: (7, 5)}
# nvidia-smi takes seconds on a machine of eight GPUs; with a driver that hangs, it does not end
SMI_S = 20.0
_SMI_FIELDS = "name,driver_version,compute_cap,memory.total,memory.used"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
PCI = Path("/sys/bus/pci/devices")
# jax/_src/hardware_utils.py of JAX 0.10.2: the vendor Google, and the devices v2 or v3, v4, v5p, v5e, v6e, v7x
_GOOGLE = "0x1ae0"
_TPUS = {
    "0x0027": "v2 or v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
}


class Gpu(NamedTuple):
    """A line of nvidia-smi; memory in MiB."""

    name: str
    driver: str
    capability: str
    total: int
    used: int


@functools.lru_cache(maxsize=1)
def smi() -> child.Ended | None:
    """The result of nvidia-smi; None: it is not on the PATH."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    return child.run([program, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"], SMI_S)


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs; none if nvidia-smi fails."""
    ended = smi()
    if ended is None or ended.code != 0:
        return []
    rows = [[field.strip() for field in line.split(",")] for line in ended.output.splitlines()]
    return [
        Gpu(name, driver, capability, _mebibytes(total), _mebibytes(used))
        for name, driver, capability, total, used in (row for row in rows if len(row) == len(Gpu._fields))
    ]


def tpus() -> list[str]:
    """The generation of each TPU chip of this machine."""
    generations = []
    for device in sorted(PCI.glob("*")):
        if _text(device / "vendor") == _GOOGLE and (name := _TPUS.get(_text(device / "device"))):
            generations.append(name)
    return generations


def nvidia() -> Iterator[Finding]:
    """The NVIDIA GPUs, and whether their driver is new enough for the CUDA of JAX's plugin."""
    ended, nvidia_gpus = smi(), gpus()
    if ended is None and DRIVER_FILE.exists():
        mend = "start the container with all of the driver: docker run --gpus all"
        yield problem("the kernel has the NVIDIA driver, but there is no nvidia-smi on the PATH", mend)
    elif ended is None:
        yield ok("no NVIDIA GPU (there is no nvidia-smi on the PATH)")
    elif ended.code is None:
        yield problem(f"nvidia-smi does not end ({SMI_S:g} s): the driver hangs", "restart the machine")
    elif not nvidia_gpus:
        mend = "install the driver (nvidia.com/drivers), or restart the machine after its update"
        yield problem(f"nvidia-smi finds no GPU: {ended.reason}", mend)
    else:
        for gpu in dict.fromkeys(gpu._replace(used=0) for gpu in nvidia_gpus):
            count = sum(other._replace(used=0) == gpu for other in nvidia_gpus)
            yield ok(f"{count} x {gpu.name}, {gpu.total:,} MiB each, driver {gpu.driver}")
        yield from _too_old(nvidia_gpus[0])
        yield from _in_use(nvidia_gpus)


def _too_old(gpu: Gpu) -> Iterator[Finding]:
    majors = {int(name[1]) for plugin in packages.plugins() if (name := re.match(r"jax-cuda(\d+)-plugin", plugin))}
    for major in sorted(majors):
        oldest, driver = OLDEST_DRIVER.get(major, 0), _numbers(gpu.driver)
        if driver and driver[0] < oldest:
            fits = [f"cuda{other}" for other, needed in OLDEST_DRIVER.items() if needed <= driver[0]]
            mend = "install a newer driver (nvidia.com/drivers)"
            mend += f", or pip install 'jax[{fits[-1]}]'" if fits else ""
            yield problem(f"driver {gpu.driver} is too old for the plugin for CUDA {major}: it needs {oldest}", mend)
        needed = OLDEST_CAPABILITY.get(major, (0, 0))
        if _numbers(gpu.capability) and _numbers(gpu.capability) < needed:
            fault = (
                f"{gpu.name} has compute capability {gpu.capability}, but CUDA {major} needs {needed[0]}.{needed[1]}"
            )
            yield problem(
                fault, f"pip uninstall jax-cuda{major}-plugin jax-cuda{major}-pjrt; pip install 'jax[cuda12]'"
            )


def _in_use(nvidia_gpus: list[Gpu]) -> Iterator[Finding]:
    busy = [gpu for gpu in nvidia_gpus if gpu.used > gpu.total / 4]
    if busy:
        most = max(gpu.used for gpu in busy)
        used = f"other programs hold memory of {plural(len(busy), 'GPU')}, up to {most:,} MiB"
        yield warning(used, "nvidia-smi shows the programs: end them, or choose a GPU with CUDA_VISIBLE_DEVICES")


def tpu() -> Iterator[Finding]:
    """The TPU chips, and whether libtpu is there for them."""
    generations = tpus()
    if not generations:
        yield ok("no TPU chip")
        return
    yield ok(f"{plural(len(generations), 'chip')} {generations[0]}")
    if not {"libtpu", "libtpu-nightly"} & packages.plugins().keys():
        yield problem("libtpu, which JAX needs for them, is not installed", packages.install("tpu"))


def _mebibytes(field: str) -> int:
    """The memory in a field of nvidia-smi; 0 for the [N/A] of a GPU that shares the memory of the machine."""
    return int(field) if field.isdecimal() else 0


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of `580.65.06`; empty if it does not begin with one."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
