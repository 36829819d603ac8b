"""TPU slices as targets of a compilation, with none attached. libtpu describes them."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from mesh_transformer import slices
from mesh_transformer.errors import UserError


def missing_compiler() -> str | None:
    """See `Target.missing_compiler`."""
    if importlib.util.find_spec("libtpu") is not None:
        return None
    return "libtpu (pip install -e '.[tpu]' in an environment of its own)"


def slice_devices(name: str) -> Sequence[jax.Device]:
    """The devices of a TPU slice such as v3-32, or of several slices such as 2xv5e-16, as targets of a compilation.

    Raises:
        UserError: the type is unknown, or libtpu is not installed.
    """
    count, kind = slices.several(name)
    if missing := missing_compiler():
        raise UserError(f"compiling for TPUs needs {missing}")
    # otherwise libtpu asks the cloud which TPU this machine has
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # no device is opened, so that no lock is needed
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # without these, libtpu prints errors on a machine that has no TPU
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", kind.name)
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # libtpu's name of the topology
    topology = f"{kind.generation.name.replace('v7x', 'tpu7x')}:{kind.topology}"
    options: dict[str, Any] = {}
    if kind.generation.devices_per_chip < kind.generation.cores_per_chip:
        options["chip_config_name"] = "megacore"
    # without this libtpu gives every host four chips
    if kind.hosts == 1:
        sizes = [int(size) for size in kind.topology.split("x")]
        options["chips_per_host_bounds"] = (*sizes, 1)[:3]
    if count > 1:
        options["num_slices"] = count
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
