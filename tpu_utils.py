"""Create, list, describe and delete Cloud TPU VMs and queued resources, and run commands on their hosts.

Python programs can use `Tpus`, `TpuRequest` and `Pod`. The module needs neither jax nor ray. See docs/pod.md.
"""

from mesh_transformer import environment
from mesh_transformer.runtime import cli

with environment.explained_imports(__name__):
    from mesh_transformer.cloud.api import ErrorKind, TpuFailed, TpuRefused
    from mesh_transformer.cloud.hosts import Access, Host, HostsFailed, HostsRefused, Outcome
    from mesh_transformer.cloud.launch import pod_of, public_keys
    from mesh_transformer.cloud.pod import Pod
    from mesh_transformer.cloud.request import TpuRequest
    from mesh_transformer.cloud.state import Tpu, TpuPhase
    from mesh_transformer.cloud.tpus import Tpus
    from mesh_transformer.commands.tpu import main

__all__ = [
    "Access", "Host", "HostsFailed", "HostsRefused", "ErrorKind", "Outcome", "TpuPhase", "Pod", "TpuRequest", "Tpu",
    "TpuFailed", "TpuRefused", "Tpus", "main", "pod_of", "public_keys",
]  # fmt: skip

if __name__ == "__main__":
    cli.run(main)
