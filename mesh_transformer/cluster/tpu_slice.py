"""A TPU slice of the cloud as the hosts of a Ray cluster: launched, and launched again when it was taken.

The one place where `cluster` meets `cloud`.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time

from mesh_transformer.cloud import head
from mesh_transformer.cloud.archive import code_archive
from mesh_transformer.cloud.environment import Environment, Existing
from mesh_transformer.cloud.launch import Plan, launch
from mesh_transformer.cloud.login import public_keys
from mesh_transformer.cloud.pod import Access, Pod
from mesh_transformer.cloud.provision import CHECKOUT
from mesh_transformer.cloud.request import Request, Tier
from mesh_transformer.cloud.state import Phase
from mesh_transformer.cloud.tpus import Tpus
from mesh_transformer.cluster.processes_by_id import Process
from mesh_transformer.errors import RunError
from mesh_transformer.logs import log
from mesh_transformer.slices import parse

# Ray holds no more than some batches; and where a node has CPUs to give it starts an idle process for each of them.
STORE = ("--object-store-memory=1000000000",)
NODE = ("--num-cpus=1", *STORE)
AGAIN_S = (10.0, 60.0)  # pause after an attempt that failed: the first, the longest
_STATES = {Phase.LOST: "PREEMPTED", Phase.GOING: "DELETING", Phase.STOPPED: "STOPPED"}  # of failures.TAKEN


class TpuSlice:
    """The hosts of one slice (`base.Hosts`).

    Args:
        tpus: where it is, or is to be.
        request: what it is.
        plan: how its hosts are made ready.
        folder: for the state of this machine's Ray head; the next driver finds it there.
    """

    def __init__(self, tpus: Tpus, request: Request, plan: Plan, folder: str):
        self._tpus, self._request, self._plan, self._folder = tpus, request, plan, folder
        self._pod: Pod | None = None
        self.address = ""  # of the Ray cluster
        self.count = request.type.hosts

    @classmethod
    def of(
        cls,
        name: str,
        zone: str,
        kind: str,
        *,
        preemptible: bool,
        environment: str | None,
        wheelhouse: str | None,
        access: Access,
    ) -> TpuSlice:
        """The slice that train.py's options name.

        Args:
            kind: such as v3-32.
            environment, wheelhouse: as `environment_of`.
            access: how to log in.

        Raises:
            UserError: an option is wrong, or there are no credentials.
        """
        code = code_archive(
            CHECKOUT
        )  # hosts that come later get this driver's code, whatever is edited meanwhile
        plan = Plan(environment_of(environment, wheelhouse), access, NODE, code=code)
        tier: Tier = "preemptible" if preemptible else "on-demand"
        request = Request(name, parse(kind), tier=tier, ssh_keys=public_keys(plan.access))
        folder = os.path.join(os.path.expanduser("~"), ".mesh_transformer", f"head-{name}")
        return cls(Tpus(zone), request, plan, folder)

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
        if self._pod is None:
            return
        try:
            self._pod.kill(worker_id, *process)
        except RunError as error:
            log.warning("%s", error)

    def remake(self) -> None:
        pause, longest = AGAIN_S
        while True:
            try:
                self.launch()
                return
            except RunError as error:  # such as a host that cannot be reached: it comes back, or is taken
                log.warning("%s; trying again in %.0f s", error, pause)
                time.sleep(pause)
                pause = min(longest, 2 * pause)


def environment_of(existing: str | None, wheelhouse: str | None) -> Environment | Existing:
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
