"""A TPU slice of the cloud as the hosts of a Ray cluster: made, provisioned, and made again when it was taken.

The one place where `cluster` meets `cloud`.
"""

from __future__ import annotations

import os
import socket
import time

from mesh_transformer.cloud import head
from mesh_transformer.cloud.environment import Environment, Existing
from mesh_transformer.cloud.login import pod_of, public_keys
from mesh_transformer.cloud.pod import Access, Pod
from mesh_transformer.cloud.provision import CHECKOUT, Join, provision
from mesh_transformer.cloud.request import Request
from mesh_transformer.cloud.state import Phase
from mesh_transformer.cloud.tpus import Tpus
from mesh_transformer.errors import RunError
from mesh_transformer.logs import log
from mesh_transformer.slices import parse

PORT = 6379
AGAIN_S = (10.0, 60.0)  # pause after an attempt that failed: the first, the longest
_STATES = {Phase.LOST: "PREEMPTED", Phase.GOING: "DELETING", Phase.STOPPED: "STOPPED"}  # of failures.TAKEN


class TpuSlice:
    """The hosts of one slice (`base.Hosts`).

    Args:
        name, zone, type_name: such as "trainer", "europe-west4-a" and "v3-32".
        preemptible: of capacity that the cloud may take back.
        folder: for the state of this machine's Ray head; the next driver finds it there.
    """

    def __init__(self, name: str, zone: str, type_name: str, *, preemptible: bool, folder: str):
        self._tpus = Tpus(zone)
        self._access = Access(known_hosts="")
        self._request = Request(
            name,
            parse(type_name),
            tier="preemptible" if preemptible else "on-demand",
            ssh_keys=public_keys(self._access),
        )
        self._environment: Environment | Existing = Environment(os.path.join(CHECKOUT, "requirements.txt"))
        self._folder = folder
        self._pod: Pod | None = None
        self.address = ""  # of the Ray cluster
        self.count = self._request.type.hosts

    def launch(self) -> None:
        """Have the slice, with Ray on every host, joined to the head on this machine.

        Raises:
            UserError, RunError: the cloud's reason, or that of the hosts.
        """
        tpu = self._tpus.ensure(self._request)
        self._pod = pod_of(self._tpus, tpu, self._access)
        self._pod.wait_reachable()
        made = head.start(self._folder, _own_address(self._pod.hosts[0].address), PORT)
        os.environ.update(made.environment())
        self.address = made.address
        provision(self._pod, self._environment, Join(made.address, made.token_file))

    def state(self) -> str | None:
        found = self._tpus.find(self._request.name)
        return "GONE" if found is None else _STATES.get(found.phase, found.state)

    def kill(self, worker_id: int, pid: int) -> None:
        if self._pod is None:
            return
        try:
            self._pod.kill(worker_id, pid)
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


def _own_address(towards: str) -> str:
    """This machine's address as a host sees it: no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])
