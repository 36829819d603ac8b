"""The whole way from a request for a TPU to hosts whose Ray nodes have joined the driver's; each part only where it lacks."""

import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from mesh_transformer.cloud.archive import Archive
from mesh_transformer.cloud.environment import Python
from mesh_transformer.cloud.head import Head
from mesh_transformer.cloud.login import pod_of, public_keys
from mesh_transformer.cloud.pod import Access, Pod
from mesh_transformer.cloud.provision import Join, Provisioned, provision
from mesh_transformer.cloud.request import Request
from mesh_transformer.cloud.tpus import DAY_S, Tpus

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What a launch needs to know besides the TPU."""

    environment: Python
    access: Access  # with known_hosts "" the API tells the hosts' keys
    ray_arguments: tuple[str, ...] = ()  # of `ray start` on the hosts
    code: Archive | None = None  # None: what CHECKOUT holds at each launch
    tpu_timeout_s: float = DAY_S
    ssh_timeout_s: float = 300.0


@dataclass(frozen=True)
class Launched:
    """A pod that is up."""

    pod: Pod
    provisioned: Provisioned
    seconds: Mapping[str, float]  # how long each part took, in order


def launch(tpus: Tpus, request: Request, head: Head, plan: Plan) -> Launched:
    """Have the TPU, its hosts and Ray on them; what is there already is used. A lost TPU is made again.

    Args:
        tpus: where.
        request: the TPU; our public key is added to those that may log in.
        head: the driver's Ray node (`head.start`).
        plan: the rest.

    Raises:
        TpuRefused, TpuFailed: the TPU cannot be had.
        HostsFailed, HostsRefused: some host did not do its part.
        UserError: something here is missing or wrong.
    """
    request = dataclasses.replace(request, ssh_keys=request.ssh_keys or public_keys(plan.access))
    began = time.monotonic()
    tpu = tpus.ensure(request, plan.tpu_timeout_s)
    ready = time.monotonic()
    pod = pod_of(tpus, tpu, plan.access)
    pod.wait_reachable(plan.ssh_timeout_s)
    reached = time.monotonic()
    join = Join(head.address, head.token_file, plan.ray_arguments)
    provisioned = provision(pod, plan.environment, join, code=plan.code)
    seconds = {"tpu": ready - began, "ssh": reached - ready, **provisioned.seconds}
    log.info("TPU %s is up: %s", tpu.name, ", ".join(f"{name} {s:.1f} s" for name, s in seconds.items()))
    return Launched(pod, provisioned, seconds)
