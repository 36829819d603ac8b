"""The whole way from a request for a TPU to hosts whose Ray nodes have joined the driver's; each part only where it lacks.

Its first part alone: whose keys may log in, and which hosts are the right ones.
"""

import dataclasses
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from mesh_transformer import files
from mesh_transformer.cloud.archive import Archive
from mesh_transformer.cloud.head import Head
from mesh_transformer.cloud.pod import Access, Pod
from mesh_transformer.cloud.provision import Join, Provisioned, Python, provision
from mesh_transformer.cloud.request import Request
from mesh_transformer.cloud.state import Phase, Tpu
from mesh_transformer.cloud.tpus import DAY_S, Tpus
from mesh_transformer.errors import RunError, UserError

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


def public_keys(access: Access) -> tuple[str, ...]:
    """What `Request.ssh_keys` takes so that `access` may log in: its user with the public half of its key.

    Raises:
        UserError: `access` names a key that is not there, or whose public half is not.
    """
    made = []
    for path in access.key_files():
        try:
            with open(f"{path}.pub", encoding="utf-8") as file:
                made.append(f"{access.user}:{file.read().strip()}")
        except FileNotFoundError as error:
            if access.key_file is not None:
                raise UserError(
                    f"no file {path}.pub: make it with `ssh-keygen -y -f {path} > {path}.pub`"
                ) from error
    return tuple(made)


def pod_of(tpus: Tpus, tpu: Tpu, access: Access, *, external: bool = False) -> Pod:
    """The hosts of a TPU that is ready.

    Args:
        tpus: where it is.
        tpu: as `tpus` describes it.
        access: how to log in; an empty `known_hosts` asks the API for the hosts' keys.
        external: use external addresses: for a driver outside the TPU's network.

    Raises:
        UserError: the TPU is not ready, or has no such addresses.
        TpuFailed: its hosts have not published their keys yet.
    """
    if tpu.phase is not Phase.READY:
        raise RunError(f"TPU {tpu.name} is not ready: {tpu.state}")
    hosts = tpu.hosts(external=external)
    if not all(host.address for host in hosts):
        raise UserError(
            f"TPU {tpu.name} has no external addresses: run this on a machine of its network without --external"
        )
    if not access.known_hosts:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        folder = os.path.join(cache, "mesh-transformer", "known_hosts")
        path = os.path.join(folder, f"{tpus.project}.{tpus.zone}.{tpu.name}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        keys = tpus.host_keys(tpu)
        lines = [f"{host.address} {key}\n" for host in hosts for key in keys[host.worker_id]]
        files.replace(path, "".join(lines).encode())
        access = dataclasses.replace(access, known_hosts=path)
    return Pod(hosts, access)
