"""train.py on the pod of hosts as a user launches it, with data and checkpoints in a bucket; and the faults of its
machines."""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import commands
from support.driving import Driver
from support.gcs_server import GcsServer
from support.hosts import DRIVER, PodOfHosts
from support.tpu_api import TpuApi
from support.waiting import LONG_S
from support.xla import DEVICES

TPU = "pod"
TARGET_ARGUMENTS = ("--tpu", TPU, "--tpu_region", "europe-west4-a", "--tpu-type", "v3-32", "--preemptible")
WORKER = "mesh_transformer.cluster.host.worker"
SHAKESPEARE = commands.REPO / "data/tiny_shakespeare"
# a smaller configs/tiny_shakespeare.json; dp 2, fsdp 2, tp 2 over the eight devices of four processes
CONFIG: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "d_model": 32, "n_heads": 4, "n_vocab": 257, "seq": 32, "pe_rotary_dims": 8},
    "optimizer": {"lr": 1e-2, "end_lr": 1e-3, "warmup_steps": 10},
    "mesh": {"fsdp": 2, "tp": 2},
    "data": {
        "train_set": "gs://texts/train.index", "val_set": {"shakespeare": "gs://texts/val.txt"}, "tokenizer": "bytes",
        "batch_size": 8, "shuffle": True, "val_batches": 4,
    },
    "checkpoint": {"model_dir": "run", "keep_every": None},
    "logging": {"tensorboard": False},
}  # fmt: skip


class PodDrivers:
    """Starts drivers in the driver's namespaces.

    Args:
        gcs: the server for gs:// paths of driver and hosts; its bucket `texts` has tiny_shakespeare.
        shared: a folder of driver and hosts. The hosts cannot access the driver's home folder, `private`, which has the
            records of the training text too.
    """

    def __init__(self, hosts: PodOfHosts, api: TpuApi, gcs: GcsServer, shared: Path):
        self.hosts, self.api, self.gcs, self.shared = hosts, api, gcs, shared
        self.private = hosts.driver_home
        keys = hosts.driver_home / ".ssh"
        keys.mkdir(mode=0o700, exist_ok=True)
        for suffix in ("", ".pub"):
            shutil.copy(f"{hosts.key_file}{suffix}", keys / f"google_compute_engine{suffix}")
        options = ("--tokenizer", "bytes", "--seq", str(CONFIG["model"]["seq"]))
        text = str(SHAKESPEARE / "train.txt")
        commands.run("create_finetune_tfrecords.py", text, "train", *options, cwd=self.private)
        (self.records,) = self.private.glob("train_*.tfrecords")
        gcs.put("texts", self.records.name, self.records.read_bytes())
        gcs.put("texts", "train.index", f"{self.records.name}\n".encode())
        gcs.put("texts", "val.txt", (SHAKESPEARE / "val.txt").read_bytes())

    def write(self, name: str, steps: int, every: int, *, shared: bool = True) -> Path:
        """Create the folder of a new run.

        A `shared` run has its checkpoints in a folder of all hosts, and the hosts read the training data from the
        bucket. Otherwise folder and training data are the driver's, which streams the data, and the checkpoints go to
        the bucket `models`, below the name of the folder.
        """
        groups = {
            "optimizer": {"total_steps": steps, "anneal_steps": steps},
            "data": {"val_every": every},
            "checkpoint": {"ckpt_every": every},
        }
        if not shared:
            groups["data"] |= {"read_by": "driver", "train_set": str(self.records)}
            groups["checkpoint"] |= {"bucket": "models", "model_dir": name}
        folder = (self.shared if shared else self.private) / name
        folder.mkdir()
        whole = {group: {**values, **groups.get(group, {})} for group, values in CONFIG.items()}
        (folder / "config.json").write_text(json.dumps(whole))
        return folder

    @contextlib.contextmanager
    def start(self, folder: Path, *arguments: str, program: str = "train.py") -> Iterator[Driver]:
        """A driver that is killed at the end if it still runs."""
        variables = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{DEVICES}=2",
            "HF_HUB_OFFLINE": "1",
            **self.gcs.environment(),
            "JAX_COMPILATION_CACHE_DIR": str(self.shared / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        of_workers = [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]
        own = {**self.gcs.environment(), **self.api.environment()}
        prefix = [*self.hosts.driver_prefix(**own), "env", "-C", str(folder)]
        # the hosts have fewer devices than the slice
        fit = ["--no-preflight"] if program == "train.py" else []
        given = [*TARGET_ARGUMENTS, "--environment", sys.prefix, *of_workers, *fit, *arguments]
        driver = Driver(folder, *given, prefix=prefix, program=program)
        try:
            yield driver
        finally:
            if driver.process.poll() is None:
                self.kill(driver)
            # pytest shows it if the test fails
            sys.stderr.write(f"{driver.text}\n")

    def kill(self, driver: Driver) -> None:
        """kill -9."""
        self.hosts.driver_signal(driver.process, signal.SIGKILL)
        driver.process.wait(LONG_S)

    def worker(self, i: int) -> int:
        """The process ID of the worker of host `i`, on that host."""
        return self._only(i, "-f", WORKER)

    def environment(self, i: int) -> dict[str, str]:
        """The environment of the worker of host `i`."""
        text = self.hosts.inside(i, "cat", f"/proc/{self.worker(i)}/environ").stdout
        return dict(line.split("=", 1) for line in text.split("\0") if line)

    def raylet(self, i: int) -> int:
        """The process ID of the raylet of host `i`, on that host."""
        return self._only(i, "-x", "raylet")

    def agent(self, i: int) -> int:
        """The process ID of the agent of host `i`, on that host."""
        return self._only(i, "-f", "^ray::Agent")

    def kill_head(self) -> None:
        """kill -9 of the server of the Ray head. The nodes of the cluster end too, and are restarted."""
        done = self.hosts.inside(-1, "pkill", "-KILL", "-x", "gcs_server")
        assert done.returncode == 0, done.stderr

    def signal(self, i: int, pid: int, name: str) -> None:
        """Send a signal to a process of host `i`."""
        done = self.hosts.inside(i, "kill", f"-{name}", str(pid))
        assert done.returncode == 0, done.stderr

    def outside(self, i: int, pid: int) -> int:
        """The process ID on this machine of a process of host `i`."""
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
    """Drivers with a cloud in which every TPU has these hosts."""
    # hosts have their own /tmp
    shared = Path(tempfile.mkdtemp(prefix="mesh-transformer-pod-", dir="/var/tmp"))
    try:
        with TpuApi(hosts.addresses, hosts.host_keys()) as api, GcsServer(DRIVER) as gcs:
            yield PodDrivers(hosts, api, gcs, shared)
    finally:
        shutil.rmtree(shared, ignore_errors=True)
