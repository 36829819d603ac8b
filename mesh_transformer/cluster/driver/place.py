"""Where a job runs: in this process, in several of this machine, on a Ray cluster, or on a TPU slice of the cloud.

The one place where `cluster` meets `cloud`.
"""

import argparse
import contextlib
import dataclasses
import getpass
import glob
import importlib.util
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mesh_transformer import files, slices
from mesh_transformer.cloud import head
from mesh_transformer.cloud.api import Timing, pauses
from mesh_transformer.cloud.archive import CHECKOUT, code_archive
from mesh_transformer.cloud.launch import Environment, Existing, Plan, Python, launch, public_keys
from mesh_transformer.cloud.pod import Access, Pod
from mesh_transformer.cloud.request import Request, Tier
from mesh_transformer.cloud.tpus import Phase, Tpus
from mesh_transformer.cluster.backends.agents import AgentCluster, ProcessCluster
from mesh_transformer.cluster.base import Hosts, Job, Process, run_name
from mesh_transformer.cluster.driver.supervise import Supervisor, View
from mesh_transformer.cluster.host.worker import run_job
from mesh_transformer.config import Config
from mesh_transformer.errors import RunError, UserError
from mesh_transformer.logs import log
from mesh_transformer.stop_signals import StopSignals

# flags, help text, further arguments of add_argument
_OPTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("--tpu", "run on this TPU slice; it is created if it does not exist", {"metavar": "NAME"}),
    ("--tpu_region --tpu-region", "zone of the slice, such as europe-west4-a", {"metavar": "ZONE"}),
    ("--tpu-type", "type of the slice, such as v4-32 (default: v3-N, N being mesh.tpu_size)", {"metavar": "T"}),
    ("--environment", "existing Python environment on the hosts (default: install a new one)", {"metavar": "DIR"}),
    ("--wheelhouse", "install the hosts' packages from the wheels in DIR, without internet", {"metavar": "DIR"}),
    ("--user", "login name on the hosts (default: your login name on this machine)", {}),
    ("--ssh-key", "private SSH key (default: that of gcloud, or the first one in ~/.ssh)", {"metavar": "FILE"}),
    ("--preemptible", "cheaper capacity that the cloud may preempt at any time", {"action": "store_true"}),
    ("--ray-address", "run on this Ray cluster, HOST:PORT or auto", {"metavar": "A"}),
    ("--processes", "run in N processes on this machine", {"type": int, "metavar": "N"}),
    ("--env", "environment variable of the workers; may be repeated",
     {"action": "append", "default": [], "metavar": "NAME=VALUE"}),
    ("--price", "price of a chip-hour; the driver prints the cost of the run", {"type": float, "metavar": "P"}),
)  # fmt: skip
# Ray holds no more than some batches; and where a node has CPUs to give it starts an idle process for each of them.
STORE = ("--object-store-memory=1000000000",)
NODE = ("--num-cpus=1", *STORE)
AGAIN = Timing(pause_s=10.0, longest_pause_s=60.0)  # after an attempt that failed
_STATES = {
    Phase.LOST: "PREEMPTED",
    Phase.GOING: "DELETING",
    Phase.STOPPED: "STOPPED",
}  # of failures.PREEMPTED_STATES


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
        on_tpu, installs = self.tpu is not None, self.wheelhouse is not None
        wheels = os.path.join(glob.escape(self.wheelhouse or ""), "*.whl")
        faults = {
            "--tpu, --ray-address and --processes name three places: give one of them":
                on_tpu + (self.ray_address is not None) + (self.processes is not None) > 1,
            "--tpu needs the zone of the TPU: --tpu_region ZONE, such as europe-west4-a": on_tpu and self.zone is None,
            "--environment and --wheelhouse are for the hosts of --tpu": not on_tpu and (installs or self.environment is not None),
            "--environment names one that exists, --wheelhouse installs a new one: give one of them":
                installs and self.environment is not None,
            f"--wheelhouse {self.wheelhouse}: no folder with wheels; docs/pod.md says how to make one":
                installs and not glob.glob(wheels),
            f"--processes {self.processes}: must be 1 or more": self.processes is not None and self.processes < 1,
            f"--price {self.price}: must be 0 or more": self.price is not None and self.price < 0,
            "--env is for the workers of --tpu, --ray-address and --processes; here, set them as usual": self.here and self.variables,
        }  # fmt: skip
        for told, wrong in faults.items():
            if wrong:
                raise UserError(told)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """The options, for a command line."""
        for flags, text, settings in _OPTIONS:
            parser.add_argument(*flags.split(), help=text, **settings)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Place":
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
            return run_job(job)
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
        hosts = Hosts(self.ray_address) if self.ray_address is not None else self._slice(config)
        # Ray reads its variables when it is imported, and a launch sets the token's
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a late call must not start a cluster of its own
        from mesh_transformer.cluster.backends.ray_cluster import RayCluster

        yield RayCluster(name, hosts, self.variables), hosts

    def _slice(self, config: Config) -> Hosts:
        """The TPU slice, with Ray on its hosts."""
        kind = slices.parse(self.tpu_type or f"v3-{config.mesh.tpu_size or 8}")
        # "": the API tells the hosts' keys
        access = Access("", self.user or getpass.getuser(), self.ssh_key)
        tier: Tier = "preemptible" if self.preemptible else "on-demand"
        request = Request(str(self.tpu), kind, tier=tier, ssh_keys=public_keys(access))
        made = TpuSlice(str(self.zone), request, environment_of(self.environment, self.wheelhouse), access)
        made.launch()
        return made


class TpuSlice(Hosts):
    """The hosts of one slice.

    Args:
        zone, request: where and what it is.
        environment: the Python of its hosts.
        access: how to log in.

    Raises:
        UserError: the zone cannot be one, or there are no credentials.
    """

    def __init__(self, zone: str, request: Request, environment: Python, access: Access):
        super().__init__(count=request.type.hosts)
        self._tpus, self._request = Tpus(zone), request
        # hosts that come later get this driver's code, whatever is edited meanwhile
        self._plan = Plan(environment, access, NODE, code=code_archive(CHECKOUT))
        # for the state of this machine's Ray head; the next driver finds it there
        self._folder = os.path.join(os.path.expanduser("~"), ".mesh_transformer", f"head-{request.name}")
        self._pod: Pod | None = None

    def launch(self) -> None:
        """Have the slice, with Ray on every host, joined to the head on this machine.

        Raises:
            UserError, RunError: the cloud's reason, or that of the hosts.
        """
        tpu = self._tpus.ensure(self._request, self._plan.tpu_timeout_s)
        node = head.start(self._folder, _own_address(tpu.hosts()[0].address), arguments=STORE)
        os.environ.update(node.environment())
        self.address = node.address
        self._pod = launch(self._tpus, self._request, node, self._plan).pod

    def state(self) -> str | None:
        found = self._tpus.find(self._request.name)
        return "GONE" if found is None else _STATES.get(found.phase, found.state)

    def kill(self, worker_id: int, process: Process) -> None:
        try:
            if self._pod is not None:
                self._pod.kill(worker_id, *process)
        except RunError as error:
            log.warning("%s", error)

    def remake(self) -> None:
        for pause_s in pauses(AGAIN):
            try:
                self.launch()
                return
            except RunError as error:  # such as a host that cannot be reached: it comes back, or is taken
                log.warning("%s; trying again in %.0f s", error, pause_s)
                time.sleep(pause_s)


def environment_of(existing: str | None, wheelhouse: str | None) -> Python:
    """The Python of the hosts.

    Args:
        existing: a folder of theirs that holds it; None: it is made there, and can evaluate if this one can.
        wheelhouse: a folder of this machine with the packages for it; None: they come from the index.
    """
    if existing is not None:
        return Existing(existing)
    extra = ("lm-eval",) if importlib.util.find_spec("lm_eval") is not None else ()
    return Environment(os.path.join(CHECKOUT, "requirements.txt"), ("jax[tpu]", *extra), wheelhouse)


def _own_address(towards: str) -> str:
    """This machine's address as a host sees it: no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])
