"""The differences between CPU, GPU and TPU, and the setup of JAX: processes and compile cache."""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import re
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import jax
from jax.experimental.compilation_cache import compilation_cache

from mesh_transformer import cache_folders, cpu_devices
from mesh_transformer.config import ComputeConfig
from mesh_transformer.errors import UserError, plural

_CACHE_SETTINGS = {
    "jax_compilation_cache_max_size": 8 << 30,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
# the other processes end this long after one has died or stopped; the default of JAX is 100
HEARTBEAT_TIMEOUT_S = 20
# time for the other processes to end for the same reason
LEAVE_S = 5
# the values of "auto": on a CPU, and on a GPU or TPU
_AUTO = {"dtype": ("float32", "bfloat16"), "remat": ("none", "full"), "logits_mib": (128, 1024)}
# values of JAX_PLATFORMS: the device, and the extra of pyproject.toml for it
_PLATFORMS = {"cuda": ("GPU", "cuda"), "gpu": ("GPU", "cuda"), "tpu": ("TPU", "tpu")}
_JAX_ADVICE = " (set JAX_PLATFORMS='' to automatically choose an available backend)"
_ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# what `srun` sets in each process of a step, and a batch script does not have: names of hosts, number of processes
_SLURM = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID")
# the ports of JAX's own detection of Slurm
_SLURM_PORTS = range(61440, 65536)


def start_devices() -> None:
    """Join the other processes of the job, if the environment names any, and open the devices.

    Raises:
        UserError, OSError: as in `join_job` and `open_devices`.
    """
    join_job()
    open_devices()


def open_devices() -> None:
    """Open the devices of this process.

    Raises:
        UserError: JAX_PLATFORMS names a platform that this machine does not have, or a device cannot be used.
    """
    try:
        jax.devices()
    # without a GPU, JAX raises an AssertionError without a text
    except (AssertionError, RuntimeError) as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        device, extra = next((_PLATFORMS[name] for name in asked.split(",") if name in _PLATFORMS), ("device", None))
        given = f"JAX_PLATFORMS={asked}" if asked else "JAX_PLATFORMS is not set"
        reason = " ".join(str(error).split()).removesuffix(_JAX_ADVICE)[:300]
        install = f"install the packages for it (pip install -e '.[{extra}]'), or " if extra else ""
        raise UserError(
            f"no {device} found ({given}){reason and f': {reason}'}; {install}unset JAX_PLATFORMS"
        ) from error


@contextlib.contextmanager
def threads_for_devices() -> Iterator[None]:
    """Give JAX's CPU client enough threads, if it is opened inside the context: see `cpu_devices.give_threads`. The
    environment is as before at the end."""
    before = os.environ.get("PJRT_NPROC")
    cpu_devices.give_threads()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PJRT_NPROC", None)


def join_job() -> None:
    """Join the other processes of the job, if the environment names any.

    The variables are JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID, or the
    variables of Slurm's `srun`. Without them this process runs alone. A process has all devices that its host shows
    it. CPUs communicate over gloo. Call this before the first use of a device.

    Process 0 listens only at that address, because JAX's coordinator has no authentication. If the other processes
    reach process 0 by an address that its machine does not have, it listens at JAX_COORDINATOR_BIND_ADDRESS instead.

    Raises:
        UserError: only some of the variables are set, one is not a number, or process 0 cannot listen at the address.
        OSError: another process listens there.
    """
    values = _job_variables()
    coordinator = values["JAX_COORDINATOR_ADDRESS"]
    if not coordinator:
        return
    try:
        count, index = (int(values[name] or "") for name in _ENVIRONMENT[1:])
    except ValueError as error:
        raise UserError(
            f"a job of several processes needs {', '.join(_ENVIRONMENT)}, the last two as numbers; found {values}"
        ) from error
    bind_address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or coordinator
    if index == 0:
        _check_can_listen(bind_address)
    if "cpu" in os.environ.get("JAX_PLATFORMS", ""):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        _share_compile_cache()
    jax.distributed.initialize(
        coordinator,
        count,
        index,
        coordinator_bind_address=bind_address,
        # on Slurm it would leave one GPU to each process, also to the only one of a host
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    )


def _job_variables() -> dict[str, str | None]:
    """The values of _ENVIRONMENT. If none is set, they follow from the variables of Slurm's `srun`, if it set them."""
    given = {name: os.environ.get(name) for name in _ENVIRONMENT}
    if any(given.values()) or not all(name in os.environ for name in _SLURM):
        return given
    hosts, count, index, job, step = (os.environ[name] for name in _SLURM)
    if count == "1":
        return given
    if not (job.isdecimal() and step.isdecimal()):
        raise UserError(f"SLURM_JOB_ID {job!r:.20} and SLURM_STEP_ID {step!r:.20} must be numbers, as srun sets them")
    # steps of one job run beside each other
    port = _SLURM_PORTS[(int(job) + int(step)) % len(_SLURM_PORTS)]
    return dict(zip(_ENVIRONMENT, (f"{_first_host(hosts)}:{port}", count, index), strict=True))


def _first_host(hosts: str) -> str:
    """The first name of a list of Slurm: `rack1-n08` of `rack[1-2]-n[08,11-15],login`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", hosts)
    if first is None:
        raise UserError(f"SLURM_STEP_NODELIST {hosts!r:.100}: expected names of hosts, such as n[01-04]")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _share_compile_cache() -> None:
    """Let all processes of a job on CPU read the programs that process 0 has stored.

    JAX's keys contain a fingerprint of the topology. On CPU it differs between processes, and only process 0 stores
    programs, so the other processes would compile all of them at each start. With the function that JAX uses for
    platforms without a fingerprint, the keys contain the kinds of the devices instead.
    """
    from jax._src import cache_key

    if hasattr(cache_key, "_hash_devices"):
        cache_key._hash_accelerator_config = cache_key._hash_devices  # type: ignore[assignment]


def _check_can_listen(address: str) -> None:
    """Raises as `join_job`. Without this check jaxlib ends with a segmentation fault if it cannot listen."""
    host, _, port = address.rpartition(":")
    try:
        if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
            raise ValueError(f"{port!r:.20} is not a port from 1 to 65535")
        if ":" in host.strip("[]") and not (host.startswith("[") and host.endswith("]")):
            raise ValueError("an IPv6 address needs brackets: [ADDRESS]:PORT")
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise UserError(f"JAX_COORDINATOR_ADDRESS {address}: give HOST:PORT of process 0 ({error})") from error
    for family, *_, place in addresses:
        try:
            with socket.socket(family) as probe:
                # as the coordinator does
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
                return
        except OSError as error:
            failure = error
    if failure.errno == errno.EADDRINUSE:
        message = f"another process listens at {address}, the address of JAX's coordinator"
        raise OSError(errno.EADDRINUSE, message)
    raise UserError(
        f"process 0 cannot listen at {address} ({failure.strerror}): give an address of its machine in "
        "JAX_COORDINATOR_ADDRESS, or in JAX_COORDINATOR_BIND_ADDRESS if the others reach it by another address"
    )


def leave_job(code: int) -> None:
    """After an error, end this process of a job of several processes: with the other processes if they end, else alone.

    JAX's own exit waits 300 s for the other processes, which may wait for this one.
    """
    if not jax.distributed.is_initialized():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    together = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    together.start()
    together.join(LEAVE_S)
    os._exit(code)


def require_one_process() -> None:
    """Raises UserError if the environment makes this process one of several."""
    address, count, _ = _job_variables().values()
    if address and count != "1":
        by_hand = os.environ.get("JAX_COORDINATOR_ADDRESS")
        mend = f"unset {', '.join(_ENVIRONMENT)}" if by_hand else "start it with srun --ntasks=1"
        raise UserError(
            f"this runs in one process, but the environment makes it one of {count or 'several'}, with the first at "
            f"{address}: {mend}, and use the devices of one host"
        )


class _OpenCaches:
    """The instances of `CompileCache` that have not ended, in all threads, and the settings before the first one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open = 0
        self.before: dict[str, object] = {}


_CACHES = _OpenCaches()


class CompileCache:
    """Keeps compiled programs on disk, so that a second start of an unchanged run compiles nothing.

    The folder is JAX_COMPILATION_CACHE_DIR, or mesh-transformer/compiled in the user's cache folder. The oldest
    programs are deleted when it exceeds JAX_COMPILATION_CACHE_MAX_SIZE bytes (default: 8 GiB). JAX compares program,
    flags, versions and devices. JAX_ENABLE_COMPILATION_CACHE=false disables the cache.

    As a context manager it restores the settings of JAX at the end. A cache that this process has set up itself stays
    as it is.
    """

    def __init__(self) -> None:
        self.requests = self.read = 0
        self.folder = cache_folders.compiled_programs()
        with _CACHES.lock:
            folder = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009
            _CACHES.open += 1
            if folder in (None, os.environ.get("JAX_COMPILATION_CACHE_DIR")) and _CACHES.open == 1:
                settings = {"jax_compilation_cache_dir": self.folder, **_CACHE_SETTINGS}
                settings = {name: value for name, value in settings.items() if name.upper() not in os.environ}
                _CACHES.before = {name: getattr(jax.config, name) for name in settings}
                for name, value in settings.items():
                    jax.config.update(name, value)
            elif folder is not None:
                self.folder = folder
        jax.monitoring.register_event_listener(self._count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        jax.monitoring.unregister_event_listener(self._count)
        with _CACHES.lock:
            _CACHES.open -= 1
            if _CACHES.open or not _CACHES.before:
                return
            for name, value in _CACHES.before.items():
                jax.config.update(name, value)
            _CACHES.before = {}
            # JAX keeps the folder of its first program
            compilation_cache.reset_cache()

    def _count(self, event: str, **_: object) -> None:
        self.requests += event == "/jax/compilation_cache/compile_requests_use_cache"
        self.read += event == "/jax/compilation_cache/cache_hits"

    def __str__(self) -> str:
        if not self.requests:
            return "the compile cache is off"
        return f"{plural(self.requests - self.read, 'program')} compiled, {self.read} read from {self.folder}"


def resolve(compute: ComputeConfig, platform: str) -> ComputeConfig:
    """The config with each "auto" replaced by its value for `platform` (cpu, gpu or tpu)."""
    values = {name: on_cpu if platform == "cpu" else elsewhere for name, (on_cpu, elsewhere) in _AUTO.items()}
    changes = {name: value for name, value in values.items() if getattr(compute, name) == "auto"}
    return compute.model_copy(update=changes)


def vocab_columns(platform: str) -> int:
    """Columns of the vocabulary per tile of logits: on CPU, a tile of 512 positions fits its caches."""
    return 1536 if platform == "cpu" else 1 << 16


def compiler_options(devices: Sequence[jax.Device]) -> dict[str, bool] | None:
    """The options of XLA for a program on these devices; None: the defaults.

    On several CPU devices, independent parts of a program run at the same time. XLA's default order makes more of them
    independent, so that more collectives wait at the same time: see `cpu_devices.give_threads`.
    """
    if devices[0].platform != "cpu" or len(devices) == 1:
        return None
    return {"xla_cpu_enable_concurrency_optimized_scheduler": False}


def by_slice(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """The devices of each slice, by the number of the slice.

    Without TPUs a job has as many slices as MEGASCALE_NUM_SLICES says, which the workers of several slices have in
    their environment: consecutive processes are a slice.

    Raises:
        UserError: MEGASCALE_NUM_SLICES is not a number.
    """
    slices: dict[int, list[jax.Device]] = defaultdict(list)
    count = _count_of_slices() if devices[0].platform != "tpu" else 0
    processes = 1 + max(device.process_index for device in devices)
    for device in devices:
        number = device.process_index * count // processes if count else getattr(device, "slice_index", 0)
        slices[number].append(device)
    return [slices[number] for number in sorted(slices)]


def _count_of_slices() -> int:
    text = os.environ.get("MEGASCALE_NUM_SLICES", "1")
    if not re.fullmatch("[0-9]{1,5}", text) or not int(text):
        raise UserError(f"MEGASCALE_NUM_SLICES {text!r:.20}: expected the number of slices of the job, 1 or more")
    return int(text)


def return_zero_pages(tree: Any) -> None:
    """Return the memory of arrays of zeros on CPU devices to the system, which gives pages of zeros when they are
    written. So a cache takes as much memory as was used of it. Without Linux this does nothing."""
    if not sys.platform.startswith("linux"):
        return
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards if array.nbytes > mmap.PAGESIZE else ():
            data = shard.data
            if data.devices().pop().platform == "cpu":
                address = jax.block_until_ready(data).unsafe_buffer_pointer()
                start, stop = -(-address // mmap.PAGESIZE), (address + data.nbytes) // mmap.PAGESIZE
                size = (stop - start) * mmap.PAGESIZE
                if size > 0:
                    # anonymous memory, whose pages the kernel fills with zeros
                    _libc().madvise(ctypes.c_void_p(start * mmap.PAGESIZE), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def return_freed_memory() -> None:
    """Return freed memory, which glibc keeps in its arenas, to the system. Without glibc this does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
