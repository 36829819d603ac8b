"""train.py on the pod of hosts as a user launches it, and ways to break what it runs on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from driving import Driver, write
from hosts import PodOfHosts
from tpu_api import TpuApi

TPU = "pod"
# dp 2, fsdp 2, tp 2 over the eight devices of four processes
MESH = {"fsdp": 2, "tp": 2}
WORKER = "mesh_transformer.cluster.worker"


class PodDrivers:
    """Starts drivers in the driver's namespaces; `shared` is a folder that driver and hosts have in common."""

    def __init__(self, hosts: PodOfHosts, api: TpuApi, shared: Path):
        self.hosts, self.api, self.shared = hosts, api, shared
        keys = hosts.driver_home / ".ssh"
        keys.mkdir(mode=0o700, exist_ok=True)
        for suffix in ("", ".pub"):
            shutil.copy(f"{hosts.key_file}{suffix}", keys / f"google_compute_engine{suffix}")

    def write(self, name: str, steps: int, every: int) -> Path:
        """The folder of a new run."""
        optimizer = {"total_steps": steps, "anneal_steps": steps, "gradient_accumulation_steps": 1}
        return write(
            self.shared / name,
            mesh=MESH,
            optimizer=optimizer,
            data={"val_every": every, "val_batches": 1},
            checkpoint={"ckpt_every": every, "keep_every": None},
        ).parent

    @contextlib.contextmanager
    def start(self, folder: Path, *arguments: str) -> Iterator[Driver]:
        """A driver, which is killed on the way out if it still runs."""
        variables = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "HF_HUB_OFFLINE": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.shared / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        of_workers = [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]
        place = ("--tpu", TPU, "--tpu_region", "europe-west4-a", "--tpu-type", "v3-32", "--preemptible")
        prefix = [*self.hosts.driver_prefix(**self.api.environment()), "env", "-C", str(folder)]
        driver = Driver(folder, *place, "--environment", sys.prefix, *of_workers, *arguments, prefix=prefix)
        try:
            yield driver
        finally:
            if driver.process.poll() is None:
                self.kill(driver)
            sys.stdout.write(f"{driver.text}\n")  # shown where a test fails

    def kill(self, driver: Driver) -> None:
        """kill -9."""
        self.hosts.driver_signal(driver.process, signal.SIGKILL)
        driver.process.wait(30)

    def worker(self, i: int) -> int:
        """The worker process of host `i`, as that host numbers it."""
        return self._only(i, "-f", WORKER)

    def environment(self, i: int) -> dict[str, str]:
        """That of the worker process of host `i`."""
        text = self.hosts.inside(i, "cat", f"/proc/{self.worker(i)}/environ").stdout
        return dict(line.split("=", 1) for line in text.split("\0") if line)

    def raylet(self, i: int) -> int:
        """The raylet of host `i`, as that host numbers it."""
        return self._only(i, "-x", "raylet")

    def agent(self, i: int) -> int:
        """The agent of host `i`, as that host numbers it."""
        return self._only(i, "-f", "^ray::Agent")

    def kill_head(self) -> None:
        """kill -9 of what makes the driver's machine the head: the nodes of the cluster go with it, and come back."""
        done = self.hosts.inside(-1, "pkill", "-KILL", "-x", "gcs_server")
        assert done.returncode == 0, done.stderr

    def signal(self, i: int, pid: int, name: str) -> None:
        """Send a signal to a process of host `i`."""
        done = self.hosts.inside(i, "kill", f"-{name}", str(pid))
        assert done.returncode == 0, done.stderr

    def outside(self, i: int, pid: int) -> int:
        """A process of host `i` as this machine numbers it."""
        space = self.hosts.inside(i, "readlink", "/proc/self/ns/pid").stdout.strip()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns/pid") == space:
                    lines = (folder / "status").read_text().splitlines()
                    if f"NSpid:\t{folder.name}\t{pid}" in lines:
                        return int(folder.name)
        raise AssertionError(f"host {i} has no process {pid}")

    def processes(self, i: int) -> str:
        """All processes of host `i`."""
        return self.hosts.inside(i, "ps", "-eo", "pid,ppid,stat,args").stdout

    def _only(self, i: int, *pattern: str) -> int:
        found = self.hosts.inside(i, "pgrep", *pattern).stdout.split()
        assert len(found) == 1, (found, self.processes(i))
        return int(found[0])


@contextlib.contextmanager
def pod_drivers(hosts: PodOfHosts) -> Iterator[PodDrivers]:
    """With a cloud whose every TPU is these hosts."""
    shared = Path(
        tempfile.mkdtemp(prefix="mesh-transformer-pod-", dir="/var/tmp")
    )  # hosts have their own /tmp
    try:
        with TpuApi(hosts.addresses, hosts.host_keys()) as api:
            yield PodDrivers(hosts, api, shared)
    finally:
        shutil.rmtree(shared, ignore_errors=True)
