"""From a TPU to a pod that can be logged in to: whose keys, and which hosts are the right ones."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from mesh_transformer import files
from mesh_transformer.cloud.pod import Access, Pod
from mesh_transformer.cloud.state import Phase, Tpu
from mesh_transformer.cloud.tpus import Tpus
from mesh_transformer.errors import RunError, UserError


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
        files.replace(path, known_hosts({host.address: keys[host.worker_id] for host in hosts}).encode())
        access = dataclasses.replace(access, known_hosts=path)
    return Pod(hosts, access)


def known_hosts(keys: Mapping[str, Sequence[str]]) -> str:
    """A known_hosts file: the keys of each address."""
    return "".join(f"{address} {key}\n" for address, found in keys.items() for key in found)
