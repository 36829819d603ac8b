"""The compute target of a job: this process, several processes of this machine, a Ray cluster, or a TPU.

Only this module of `cluster` uses `cloud`.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mesh_transformer import files, ray_join
from mesh_transformer.cloud import head
from mesh_transformer.cloud.api import Timing, pauses
from mesh_transformer.cloud.archive import code_archive
from mesh_transformer.cloud.environment import ExistingEnvironment, HostEnvironment, NewEnvironment
from mesh_transformer.cloud.hosts import Access
from mesh_transformer.cloud.launch import LaunchOptions, launch, public_keys
from mesh_transformer.cloud.pod import Pod
from mesh_transformer.cloud.request import Tier, TpuRequest
from mesh_transformer.cloud.state import TpuPhase
from mesh_transformer.cloud.tpus import Tpus
from mesh_transformer.cluster.backends.agents import AgentCluster, ProcessCluster
from mesh_transformer.cluster.base import Hosts, Job, Process, run_name
from mesh_transformer.cluster.driver.display import Display
from mesh_transformer.cluster.driver.failures import PREEMPTED_STATES
from mesh_transformer.cluster.driver.supervise import Supervisor
from mesh_transformer.cluster.host.worker import run_job
from mesh_transformer.config import Config
from mesh_transformer.environment import SHIPPED, variables
from mesh_transformer.errors import RunError, UserError
from mesh_transformer.logs import log
from mesh_transformer.slices import SliceType, check_count, counted, parse
from mesh_transformer.stop_signals import StopSignals

# Ray's object store holds only some batches
STORE_ARGUMENTS = ("--object-store-memory=1000000000",)
# Ray starts an idle process for each CPU of a node
NODE_ARGUMENTS = ("--num-cpus=1", *STORE_ARGUMENTS)
# pauses between attempts to recreate a slice
RECREATE_TIMING = Timing(pause_s=10.0, longest_pause_s=60.0)
# states of failures.PREEMPTED_STATES
_SLICE_STATES = {TpuPhase.LOST: "PREEMPTED", TpuPhase.DELETING: "DELETING", TpuPhase.STOPPED: "STOPPED"}


@dataclasses.dataclass(frozen=True)
class ComputeTarget:
    """The machines on which a job runs. At most one of tpu, ray_address and processes is set; if none is, this process.

    Args:
        tpu: name of a TPU.
        zone: zone of the TPU.
        tpu_type: such as v4-32; None: v3 with mesh.tpu_size cores, or with 8, as in the original program.
        slices: number of TPU slices. With `tpu`, one queued resource has them all; the tier of `preemptible` is then
            spot. Otherwise the hosts or processes are numbered slice by slice.
        environment: folder of an existing Python environment on the TPU's hosts.
        wheelhouse: folder on this machine with the packages for a new environment on the hosts.
        user, ssh_key: login on the hosts; None: this user, and `cloud.hosts.KEY_FILES`.
        ray_address: address of a Ray cluster.
        processes: number of processes on this machine.
        price: price of one chip per hour, for the cost line.
        variables: environment variables of the workers, added to the variables of their host.
        verbose: as `Display`.

    Raises:
        UserError: two options contradict each other, or a value is out of range.
    """

    tpu: str | None = None
    zone: str | None = None
    tpu_type: str | None = None
    slices: int = 1
    preemptible: bool = False
    environment: str | None = None
    wheelhouse: str | None = None
    user: str | None = None
    ssh_key: str | None = None
    ray_address: str | None = None
    processes: int | None = None
    price: float | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    verbose: bool = False

    def __post_init__(self) -> None:
        on_tpu, installs = self.tpu is not None, self.wheelhouse is not None
        wheels = os.path.join(glob.escape(self.wheelhouse or ""), "*.whl")
        faults = {
            "--tpu, --ray-address and --processes contradict each other: give one of them":
                on_tpu + (self.ray_address is not None) + (self.processes is not None) > 1,
            "--tpu needs the zone of the TPU: --tpu_region ZONE, such as europe-west4-a": on_tpu and self.zone is None,
            "--environment and --wheelhouse are for the hosts of --tpu":
                not on_tpu and (installs or self.environment is not None),
            "--environment names an existing environment, --wheelhouse installs a new one: give one of them":
                installs and self.environment is not None,
            f"--wheelhouse {self.wheelhouse}: no folder with wheels; docs/pod.md says how to make one":
                installs and not glob.glob(wheels),
            f"--processes {self.processes}: must be 1 or more": self.processes is not None and self.processes < 1,
            f"--slices {self.slices}: must be 1 or more": self.slices < 1,
            "--slices needs --tpu, --ray-address or --processes": self.in_this_process and self.slices != 1,
            f"--price {self.price}: must be 0 or more": self.price is not None and self.price < 0,
            "--env needs --tpu, --ray-address or --processes: without them, set the variable in the shell":
                self.in_this_process and self.variables,
        }  # fmt: skip
        for message, wrong in faults.items():
            if wrong:
                raise UserError(message)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "ComputeTarget":
        """The compute target of a parsed command line.

        Raises:
            UserError: as for the class, or as `environment.variables`.
        """
        given = {**vars(arguments), "zone": arguments.tpu_region, "variables": variables(arguments.env)}
        return cls(**{field.name: given[field.name] for field in dataclasses.fields(cls)})

    @property
    def in_this_process(self) -> bool:
        """Whether the job runs in this process."""
        return self.tpu is None and self.ray_address is None and self.processes is None

    def run(self, job: Job, config: Config) -> tuple[int, Any]:
        """Run a job to its end. Returns its exit code and result.

        Raises:
            UserError, RunError: as `Supervisor.run`.
        """
        if self.in_this_process:
            log.info("importing JAX")
            return run_job(job)
        with self.open(config) as (cluster, hosts), StopSignals() as stop:
            # StopSignals comes second: Ray sets signal handlers too
            display = Display(self.price, cluster.label, verbose=self.verbose)
            outcome = Supervisor(cluster, job, hosts=hosts, display=display, stop=stop).run()
            cluster.kill()
            return outcome

    def end_workers(self, config: Config) -> None:
        """End the workers that a previous driver of this run has left. Processes of this machine end with their
        driver."""
        if self.in_this_process or self.processes is not None:
            return
        with self.open(config) as (cluster, _):
            cluster.attach()
            cluster.kill()

    @contextlib.contextmanager
    def open(self, config: Config) -> Iterator[tuple[AgentCluster, Hosts]]:
        """The cluster for a run with this config. The exit ends nothing, because workers outlive their driver.

        Raises:
            UserError: the config does not say which axis crosses slices, or as for `TpuSlice`, `RayCluster`.
        """
        if self.slices > 1 and config.mesh.dcn is None:
            raise UserError(
                f"--slices {self.slices} needs mesh.dcn, the axis of the mesh that crosses slices "
                "(docs/parallelism.md): set it"
            )
        name = run_name(config)
        if self.processes is not None:
            if any(map(files.is_remote, (config.checkpoint.root, *config.data.train_files))):
                # the workers use the credentials of this machine
                files.check_credentials()
            yield ProcessCluster(name, self.processes, self.variables, self.slices), Hosts()
            return
        # before a TPU costs anything
        ray_join.check_version()
        ray = self.ray_address
        hosts = Hosts(ray, slices=self.slices) if ray is not None else self._slice(config)
        # a late call must not start another cluster
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
        log.info("joining the Ray cluster")
        # imported late: the import reads the variables of Ray, such as the token that a launch sets
        from mesh_transformer.cluster.backends.ray_cluster import RayCluster

        yield RayCluster(name, hosts, self.variables), hosts

    def slice_type(self, config: Config) -> SliceType:
        """The type of each slice for --tpu.

        Raises:
            UserError: there is no such type, or a program cannot run on several slices of it.
        """
        kind = parse(self.tpu_type or f"v3-{config.mesh.tpu_size or 8}")
        check_count(kind, self.slices)
        return kind

    def size(self, config: Config) -> str:
        """The name of the slices for --tpu, such as v4-16 or 2xv4-16. Raises as `slice_type`."""
        return counted(self.slice_type(config).name, self.slices)

    def _slice(self, config: Config) -> Hosts:
        """The slices of the TPU, with Ray on their hosts."""
        kind, several = self.slice_type(config), self.slices > 1
        # "": the API returns the hosts' keys
        access = Access("", self.user or getpass.getuser(), self.ssh_key)
        # only a queued resource has several slices, and the queue has no preemptible tier
        cheap: Tier = "spot" if several else "preemptible"
        tier: Tier = cheap if self.preemptible else "on-demand"
        keys = public_keys(access)
        request = TpuRequest(str(self.tpu), kind, tier=tier, queued=several, slices=self.slices, ssh_keys=keys)
        tpu_slice = TpuSlice(str(self.zone), request, environment_of(self.environment, self.wheelhouse), access)
        tpu_slice.launch()
        return tpu_slice


class TpuSlice(Hosts):
    """The hosts of one TPU: one slice, or several slices of one queued resource.

    Args:
        zone: zone of the TPU.
        request: its name, type, tier and number of slices.
        environment: the Python environment of its hosts.
        access: the login on its hosts.

    Raises:
        UserError: the zone is invalid, or there are no credentials.
    """

    def __init__(self, zone: str, request: TpuRequest, environment: HostEnvironment, access: Access):
        super().__init__(count=request.type.hosts * request.slices, slices=request.slices)
        self._tpus, self._request = Tpus(zone), request
        # packed now: hosts that are created later get the same code
        self._options = LaunchOptions(environment, access, NODE_ARGUMENTS, code=code_archive())
        # state of the Ray head on this machine, for the next driver
        self._folder = os.path.join(os.path.expanduser("~"), ".mesh_transformer", f"head-{request.name}")
        self._pod: Pod | None = None

    def launch(self) -> None:
        """Create the slice if needed, start Ray on every host, and connect it to the head on this machine.

        Raises:
            UserError, RunError: the cloud or a host reported an error.
        """
        tpu = self._tpus.ensure(self._request, self._options.tpu_timeout_s)
        node = head.start(self._folder, _own_address(tpu.hosts()[0].address), arguments=STORE_ARGUMENTS)
        os.environ.update(node.environment())
        self.address = node.address
        self._pod = launch(self._tpus, self._request, node, self._options).pod

    def slice_state(self) -> str | None:
        tpu = self._tpus.find(self._request.name)
        return "GONE" if tpu is None else _SLICE_STATES.get(tpu.phase, tpu.state)

    def deleted(self) -> bool:
        try:
            return self.slice_state() in PREEMPTED_STATES
        except (RunError, UserError) as error:
            log.warning("%s", error)
            return False

    def kill(self, worker_id: int, processes: Sequence[Process]) -> None:
        try:
            if self._pod is not None:
                self._pod.kill(worker_id, processes)
        except RunError as error:
            log.warning("%s", error)

    def recreate(self) -> None:
        for pause_s in pauses(RECREATE_TIMING):
            try:
                self.launch()
                return
            except RunError as error:
                # such as an unreachable host, which comes back or is preempted
                log.warning("%s; retrying in %.0f s", error, pause_s)
                time.sleep(pause_s)


def environment_of(existing: str | None, wheelhouse: str | None) -> HostEnvironment:
    """The Python environment of the hosts.

    Args:
        existing: folder of an environment on the hosts; None: a new one, with lm-eval if this environment has it.
        wheelhouse: folder on this machine with the packages for a new environment; None: a package index has them.
    """
    if existing is not None:
        return ExistingEnvironment(existing)
    extra = ("lm-eval",) if importlib.util.find_spec("lm_eval") is not None else ()
    return NewEnvironment(os.path.join(SHIPPED, "requirements.txt"), ("jax[tpu]", *extra), wheelhouse)


def _own_address(host: str) -> str:
    """The address of this machine in the network of a host. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
