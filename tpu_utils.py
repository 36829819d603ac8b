"""Create, list, describe and delete Cloud TPU VMs and queued resources, and run commands on their hosts.

Python programs can use `Tpus`, `TpuRequest` and `Pod`. The module needs neither jax nor ray. See docs/pod.md.
"""

from mesh_transformer import environment
from mesh_transformer.runtime import cli

with environment.explained_imports(__name__):
    from mesh_transformer import slices
    from mesh_transformer.cloud.api import ErrorKind, TpuFailed, TpuRefused
    from mesh_transformer.cloud.hosts import Access, Host, HostsFailed, HostsRefused, Outcome
    from mesh_transformer.cloud.launch import pod_of, public_keys
    from mesh_transformer.cloud.pod import Pod
    from mesh_transformer.cloud.request import TpuRequest
    from mesh_transformer.cloud.state import Tpu, TpuPhase
    from mesh_transformer.cloud.tpus import Tpus
    from mesh_transformer.commands.tpu import main
    from mesh_transformer.names_2021 import gone_from

__getattr__ = gone_from("tpu_utils")
__all__ = [
    "Access", "Host", "HostsFailed", "HostsRefused", "ErrorKind", "Outcome", "TpuPhase", "Pod", "TpuRequest", "Tpu",
    "TpuFailed", "TpuRefused", "Tpus", "check_tpu", "create_tpu", "delete_tpu", "main", "pod_of", "public_keys",
]  # fmt: skip


def create_tpu(name: str, zone: str, type: str, preemptible: bool) -> bool:
    """Create a TPU, and wait until it is ready. A function of 2021: `Tpus.create` has more options.

    Raises:
        UserError, TpuRefused, TpuFailed: as `Tpus.create`.
    """
    tier = "preemptible" if preemptible else "on-demand"
    Tpus(zone).create(TpuRequest(name, slices.parse(type), tier))
    return True


def check_tpu(name: str, zone: str) -> dict[str, str]:
    """The name and the state of a TPU in the API's words. A function of 2021: `Tpus.describe` tells more.

    Raises:
        TpuRefused: there is none.
    """
    tpu = Tpus(zone).describe(name)
    return {"name": tpu.name, "acceleratorType": tpu.type, "state": tpu.state}


def delete_tpu(name: str, zone: str) -> bool:
    """Delete a TPU; False if there was none. A function of 2021, see `Tpus.delete`."""
    return Tpus(zone).delete(name)


if __name__ == "__main__":
    cli.run(main)
