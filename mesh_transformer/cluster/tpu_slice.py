"""A TPU slice of the cloud as the hosts of a Ray cluster: launched, and launched again when it was taken.

The one place where `cluster` meets `cloud`.
"""

import importlib.util
import os
import socket
import time

from mesh_transformer.cloud import head
from mesh_transformer.cloud.api import Timing, pauses
from mesh_transformer.cloud.archive import CHECKOUT, code_archive
from mesh_transformer.cloud.launch import Environment, Existing, Plan, Python, launch, public_keys
from mesh_transformer.cloud.pod import Access, Pod
from mesh_transformer.cloud.request import Request, Tier
from mesh_transformer.cloud.tpus import Phase, Tpus
from mesh_transformer.cluster.base import Hosts
from mesh_transformer.cluster.host import Process
from mesh_transformer.errors import RunError
from mesh_transformer.logs import log
from mesh_transformer.slices import parse

# Ray holds no more than some batches; and where a node has CPUs to give it starts an idle process for each of them.
STORE = ("--object-store-memory=1000000000",)
NODE = ("--num-cpus=1", *STORE)
AGAIN = Timing(pause_s=10.0, longest_pause_s=60.0)  # after an attempt that failed
_STATES = {Phase.LOST: "PREEMPTED", Phase.GOING: "DELETING", Phase.STOPPED: "STOPPED"}  # of failures.TAKEN


class TpuSlice(Hosts):
    """The hosts of one slice.

    Args:
        name, zone, kind, tier: what it is; the kind is such as v3-32.
        environment: the Python of its hosts.
        access: how to log in.

    Raises:
        UserError: an argument is wrong, or there are no credentials.
    """

    def __init__(self, name: str, zone: str, kind: str, tier: Tier, environment: Python, access: Access):
        self._tpus = Tpus(zone)
        self._request = Request(name, parse(kind), tier=tier, ssh_keys=public_keys(access))
        # hosts that come later get this driver's code, whatever is edited meanwhile
        self._plan = Plan(environment, access, NODE, code=code_archive(CHECKOUT))
        # for the state of this machine's Ray head; the next driver finds it there
        self._folder = os.path.join(os.path.expanduser("~"), ".mesh_transformer", f"head-{name}")
        self._pod: Pod | None = None
        self.address = ""  # of the Ray cluster
        self.count = self._request.type.hosts

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
