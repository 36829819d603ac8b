"""The mesh of every shipped config on TPU slices, and the rows of each process, with the devices as libtpu lists them.

`tpu_devices.json` holds these devices (scripts/tpu_devices.py writes it), so the tests need no libtpu and compile
nothing.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from mesh_transformer import slices
from mesh_transformer.config import AXES, load_config, mesh_shape
from mesh_transformer.config.mesh import training_rules
from mesh_transformer.errors import UserError
from mesh_transformer.parallel.mesh import make_mesh, process_rows
from mesh_transformer.parallel.sharding import Partition

RECORDED = json.loads(Path(__file__).with_name("tpu_devices.json").read_text())
CONFIGS = {path.stem: load_config(str(path)) for path in Path(__file__).resolve().parents[2].glob("configs/*.json")}
SHAPES = [
    mesh_shape(dp=4, tp=4),
    mesh_shape(fsdp=2, tp=8),
    mesh_shape(dp=2, fsdp=4, tp=2),
    mesh_shape(fsdp=16),
    mesh_shape(tp=16),
]


@dataclass(frozen=True)
class Described:
    """The attributes of a TPU device that a mesh uses."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"


def devices_of(name):
    recorded = RECORDED[name]
    return [
        Described(number, process, (x, y, z), core, recorded["kind"])
        for process, devices in recorded["processes"]
        for number, x, y, z, core in devices
    ]


def fitting(devices):
    """The shipped configs that fit these devices: name, config, shape."""
    for name, config in CONFIGS.items():
        try:
            yield name, config, config.check_devices(len(devices))
        except UserError:
            continue


def torus(shape, devices):
    """A mesh in the order that JAX prefers, regardless of hosts."""
    sizes = tuple(shape.values())
    return Mesh(mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True), tuple(AXES))


def check_rows(config, mesh, batch):
    """Each process reads only what its devices hold, and together they read the whole batch."""
    sharding = Partition(mesh, training_rules(config.mesh)).sharding("batch", None)
    replicas = mesh.devices.reshape(-1, mesh.shape["tp"])
    size, held = batch // len(replicas), {}
    for replica, devices in enumerate(replicas):
        for device in devices:
            held.setdefault(device.process_index, set()).update(range(replica * size, (replica + 1) * size))
    found = {process: process_rows(sharding, batch, process) for process in held}
    assert found == {process: tuple(sorted(rows)) for process, rows in held.items()}
    assert set().union(*found.values()) == set(range(batch))
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_every_shipped_config_has_a_mesh_and_every_process_its_rows(name):
    devices, per_process = devices_of(name), slices.parse(name).devices_per_host
    for config_name, config, shape in fitting(devices):
        mesh = make_mesh(shape, devices)
        assert mesh.shape == shape, config_name
        assert set(mesh.devices.flat) == set(devices)
        spanned = {len({one.process_index for one in group}) for group in mesh.devices.reshape(-1, shape["tp"])}
        assert spanned == {shape["tp"] // math.gcd(shape["tp"], per_process)}, config_name
        batch = config.microbatch(shape)
        for rows in (batch, batch * config.data.val_batch_multiplier):
            check_rows(config, mesh, rows)
            check_rows(config, torus(shape, devices), rows)


@pytest.mark.parametrize("name", ["v4-32", "v5e-16", "v6e-16"])
@pytest.mark.parametrize("config", ["125M", "350M"])
def test_rows_need_not_be_consecutive(name, config):
    """Without this, check_rows would not test rows with gaps."""
    devices, config = devices_of(slices.parse(name).name), CONFIGS[config]
    rows = check_rows(config, torus(config.check_devices(len(devices)), devices), len(devices))
    assert rows[0] != tuple(range(rows[0][0], rows[0][-1] + 1))


@pytest.mark.parametrize("name", [name for name in RECORDED if len(devices_of(name)) == 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tp_group_stays_within_a_process_or_covers_the_fewest(name, shape):
    devices, per_process = devices_of(name), slices.parse(name).devices_per_host
    groups = make_mesh(shape, devices).devices.reshape(-1, shape["tp"])
    for group in groups:
        assert len({one.process_index for one in group}) == max(1, shape["tp"] // per_process)


def test_positions_within_a_process_are_the_same_in_all():
    """A data-parallel group is then a regular part of the torus."""
    mesh = make_mesh(mesh_shape(dp=4, fsdp=4), devices_of("v5litepod-16")).devices
    places = np.vectorize(lambda one: (one.coords[0] % 2, one.coords[1] % 2), otypes=[object])(mesh)
    assert all(len(set(column)) == 1 for column in places.reshape(4, 4).T)


@pytest.mark.parametrize("tp", [2, 4])
def test_the_stages_of_a_pipeline_are_on_different_processes(tp):
    """pp is the first axis: its groups are the last to share a process."""
    shape = mesh_shape(pp=2, dp=8 // tp, tp=tp)
    mesh = make_mesh(shape, devices_of("v5litepod-16"))
    assert mesh.shape == shape
    stages = [{one.process_index for one in stage.flat} for stage in mesh.devices]
    assert stages == [{0, 1}, {2, 3}]


def test_processes_with_different_numbers_of_devices_are_refused():
    with pytest.raises(UserError, match=r"the same number of devices in every process.*\{0: 4, 1: 3\}"):
        make_mesh(mesh_shape(dp=7), devices_of("v4-16")[:7])


def test_two_devices_of_one_chip_are_refused():
    """A v4 without megacore, for which JAX has no mesh."""
    devices = [Described(i, 0, (i // 2, 0, 0), i % 2, "TPU v4") for i in range(8)]
    with pytest.raises(UserError, match=r"make a mesh dp 8 of the 8 devices of process 0.*megacore"):
        make_mesh(mesh_shape(dp=8), devices)
