"""Virtual CPU devices, which the flag --xla_force_host_platform_device_count of XLA makes. Without jax."""

import os
import re

_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
# a device may wait in several independent collectives at a time
THREADS_OF_A_DEVICE = 4


def threads(devices: int) -> int:
    """The threads of JAX's CPU client, for this number of devices of the process.

    XLA takes PJRT_NPROC, else NPROC, if it is a whole number, else the cores, and at least a thread for each device.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = (os.environ.get(name, "").strip() for name in ("PJRT_NPROC", "NPROC"))
    numbers = (int(text) for text in given if re.fullmatch(r"[+-]?[0-9]{1,9}", text))
    return max(1, devices, next(numbers, cores))


def asked() -> int | None:
    """The virtual devices that XLA_FLAGS asks for; None: it does not say."""
    counts = _COUNT.findall(os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else None


def give_threads() -> None:
    """Give JAX's CPU client enough threads for virtual devices that wait for each other. Call this before the first use
    of a device.

    A collective that waits blocks a thread. The client has as many threads as devices, or as cores if these are more.
    Devices that wait in different collectives can block all of them, and then wait for ever. A PJRT_NPROC that is set
    stays.
    """
    if (devices := asked() or 1) > 1:
        os.environ.setdefault("PJRT_NPROC", str(THREADS_OF_A_DEVICE * devices))
