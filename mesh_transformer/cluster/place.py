"""Where a job runs: in this process, in several of this machine, on a Ray cluster, or on a TPU slice of the cloud."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import getpass
import glob
import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mesh_transformer import files
from mesh_transformer.cluster.agents import AgentCluster, ProcessCluster
from mesh_transformer.cluster.base import Hosts, Job, run_name
from mesh_transformer.cluster.supervise import Supervisor
from mesh_transformer.cluster.view import View
from mesh_transformer.cluster.worker import run_job
from mesh_transformer.config import Config
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.observer import Observer
from mesh_transformer.stop_signals import StopSignals

_OPTIONS: tuple[tuple[str, type, str, str], ...] = (  # with the type and the name of a value, and the help
    ("--tpu", str, "NAME", "run on this TPU slice; it is created if it does not exist"),
    ("--tpu_region --tpu-region", str, "ZONE", "zone of the slice, such as europe-west4-a"),
    ("--tpu-type", str, "T", "type of the slice, such as v4-32 (default: v3-N, N being mesh.tpu_size)"),
    ("--environment", str, "DIR", "Python environment that the hosts already have (default: a new one is installed)"),
    ("--wheelhouse", str, "DIR", "install on the hosts from the wheels in DIR (no internet)"),
    ("--user", str, "USER", "login name on the hosts (default: your name here)"),
    ("--ssh-key", str, "FILE", "private key for the login (default: gcloud's, else the first one in ~/.ssh)"),
    ("--ray-address", str, "A", "run on this Ray cluster, HOST:PORT or auto"),
    ("--processes", int, "N", "run in N processes on this machine"),
    ("--price", float, "P", "price of one chip per hour; the cost of the run is printed"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Place:
    """The options that say where. At most one of tpu, ray_address and processes is given; none: this process.

    Args:
        zone: of the TPU.
        tpu_type: such as v4-32; None: v3- with mesh.tpu_size cores, or 8, as in the original program.
        environment: a folder with a Python environment that the TPU's hosts have already.
        wheelhouse: a folder of this machine with the packages for an environment that is made there.
        user, ssh_key: for logging in to them; None: this user, and `cloud.pod.KEY_FILES`.
        variables: environment of the worker processes, on top of their host's own.
        price: of a chip-hour, for the cost line.

    Raises:
        UserError: two are given, or one is out of range.
    """

    tpu: str | None = None
    zone: str | None = None
    tpu_type: str | None = None
    preemptible: bool = False
    environment: str | None = None
    wheelhouse: str | None = None
    user: str | None = None
    ssh_key: str | None = None
    ray_address: str | None = None
    processes: int | None = None
    price: float | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        chosen = [self.tpu is not None, self.ray_address is not None, self.processes is not None]
        if sum(chosen) > 1:
            raise UserError("--tpu, --ray-address and --processes name three places: give one of them")
        if self.tpu is not None and self.zone is None:
            raise UserError("--tpu needs the zone of the TPU: --tpu_region ZONE, such as europe-west4-a")
        if self.tpu is None and (self.environment is not None or self.wheelhouse is not None):
            raise UserError("--environment and --wheelhouse are for the hosts of --tpu")
        if self.environment is not None and self.wheelhouse is not None:
            raise UserError(
                "--environment names one that exists, --wheelhouse installs a new one: give one of them"
            )
        if self.wheelhouse is not None and not glob.glob(os.path.join(glob.escape(self.wheelhouse), "*.whl")):
            raise UserError(
                f"--wheelhouse {self.wheelhouse}: no folder with wheels; docs/pod.md says how to make one"
            )
        if self.processes is not None and self.processes < 1:
            raise UserError(f"--processes {self.processes}: must be 1 or more")
        if self.price is not None and self.price < 0:
            raise UserError(f"--price {self.price}: must be 0 or more")
        if self.here and self.variables:
            raise UserError(
                "--env is for the workers of --tpu, --ray-address and --processes; here, set them as usual"
            )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """The options, for a command line."""
        for flags, kind, value, text in _OPTIONS:
            parser.add_argument(*flags.split(), type=kind, metavar=value, help=text)
        parser.add_argument(
            "--preemptible", action="store_true", help="cheaper capacity that the cloud may stop at any time"
        )
        parser.add_argument(
            "--env",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="environment variable of the workers; may be given several times",
        )

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Place:
        """From the parsed command line.

        Raises:
            UserError: as the class, or a variable is not NAME=VALUE.
        """
        given = {**vars(arguments), "zone": arguments.tpu_region, "variables": {}}
        for text in arguments.env:
            name, equals, value = text.partition("=")
            if not equals or not name:
                raise UserError(f"--env {name}{equals}: give NAME=VALUE")
            given["variables"][name] = value
        return cls(**{field.name: given[field.name] for field in dataclasses.fields(cls)})

    @property
    def here(self) -> bool:
        """Whether the job runs in this process."""
        return self.tpu is None and self.ray_address is None and self.processes is None

    def run(self, job: Job, config: Config) -> tuple[int, Any]:
        """Run a job there to its end: its exit code and result.

        Raises:
            UserError, RunError: as `Supervisor.run`.
        """
        if self.here:
            return run_job(job, Observer())
        with self.open(config) as (cluster, hosts), StopSignals() as stop:  # Ray sets handlers too
            outcome = Supervisor(cluster, job, hosts=hosts, view=View(self.price), stop=stop).run()
            cluster.kill()
            return outcome

    def end_workers(self, config: Config) -> None:
        """End what a former driver has left at work on this run. Processes of this machine end with their driver."""
        if self.here or self.processes is not None:
            return
        with self.open(config) as (cluster, _):
            cluster.attach()
            cluster.kill()

    @contextlib.contextmanager
    def open(self, config: Config) -> Iterator[tuple[AgentCluster, Hosts]]:
        """The cluster for a run with this config. Nothing is ended on the way out: workers outlive their driver."""
        name = run_name(config)
        if self.processes is not None:
            if any(map(files.is_remote, (config.checkpoint.root, config.data.train_set or ""))):
                files.check_credentials()  # the workers have this machine's
            yield ProcessCluster(name, self.processes, self.variables), Hosts()
            return
        if importlib.util.find_spec("ray") is None:  # before a TPU costs anything
            raise UserError("--tpu and --ray-address need Ray: pip install -r requirements.txt")
        made = self._launch(config) if self.ray_address is None else None
        # Ray reads its variables when it is imported, and a launch sets the token's
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a late call must not start a cluster of its own
        from mesh_transformer.cluster.ray_cluster import RayCluster

        if made is None:
            yield RayCluster(name, str(self.ray_address), None, Hosts(), self.variables), Hosts()
        else:
            yield RayCluster(name, made.address, made.count, made, self.variables), made

    def _launch(self, config: Config) -> Any:
        """The slice, with Ray on its hosts."""
        try:
            from mesh_transformer.cloud.pod import Access
            from mesh_transformer.cloud.request import Tier
            from mesh_transformer.cluster.tpu_slice import TpuSlice, environment_of
        except ImportError as error:
            raise UserError(
                f"--tpu needs mesh_transformer.cloud and its libraries ({error}): pip install -r requirements.txt; "
                f"--ray-address runs on hosts that you have made yourself"
            ) from error
        kind = self.tpu_type or f"v3-{config.mesh.tpu_size or 8}"
        # "": the API tells the hosts' keys
        access = Access("", self.user or getpass.getuser(), self.ssh_key)
        tier: Tier = "preemptible" if self.preemptible else "on-demand"
        python = environment_of(self.environment, self.wheelhouse)
        made = TpuSlice(str(self.tpu), str(self.zone), kind, tier, python, access)
        made.launch()
        return made
