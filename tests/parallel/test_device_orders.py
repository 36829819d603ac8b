"""The mesh of every shipped config on TPU slices, and the rows of each process, with the devices as libtpu lists them.

`tpu_devices.json` holds these devices (scripts/tpu_devices.py writes it), so the tests need no libtpu and compile
nothing.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from mesh_transformer import platforms, slices
from mesh_transformer.config import AXES, MeshConfig, load_config, mesh_shape
from mesh_transformer.config.mesh import training_rules
from mesh_transformer.errors import UserError
from mesh_transformer.parallel.mesh import make_hybrid_mesh, make_mesh, process_rows
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


@dataclasses.dataclass(frozen=True)
class Described:
    """The attributes of a TPU device that a mesh uses."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"
    slice_index: int = 0


def devices_of(name, slice_index=0):
    """As libtpu numbers them: the processes of a slice follow those of the slice before."""
    recorded = RECORDED[name]
    first = slice_index * len(recorded["processes"])
    return [
        Described(1000 * slice_index + number, first + process, (x, y, z), core, recorded["kind"], "tpu", slice_index)
        for process, devices in recorded["processes"]
        for number, x, y, z, core in devices
    ]


def devices_per_host(name):
    kind = slices.parse(name)
    return kind.devices // kind.hosts


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
    rules = training_rules(config.mesh)
    sharding = Partition(mesh, rules).sharding("batch", None)
    axes = [mesh.axis_names.index(axis) for axis in rules["batch"]]
    count = math.prod(mesh.devices.shape[axis] for axis in axes)
    replicas = np.moveaxis(mesh.devices, axes, range(len(axes))).reshape(count, -1)
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
    devices, per_process = devices_of(name), devices_per_host(name)
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
    devices, per_process = devices_of(name), devices_per_host(name)
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


TWO_SLICES = [*devices_of("v5litepod-16", 0), *devices_of("v5litepod-16", 1)]


@pytest.mark.parametrize(
    ("dcn", "sizes"),
    [("dp", {"dp": 4, "fsdp": 2, "tp": 4}), ("dp", {"pp": 2, "dp": 2, "tp": 8}), ("pp", {"pp": 4, "dp": 2, "tp": 4})],
)
def test_slices_are_the_outer_part_of_the_axis_between_them(dcn, sizes):
    """As in JAX's own hybrid mesh. Inside a slice, the order is that of a mesh of this slice alone."""
    shape, mesh = mesh_shape(**sizes), MeshConfig(dcn=dcn, **sizes)
    found = make_hybrid_mesh(mesh, shape, platforms.by_slice(TWO_SLICES))
    assert found.shape == shape
    part = {**shape, dcn: shape[dcn] // 2}
    outer = [2 if axis == dcn else 1 for axis in AXES]
    hybrid = mesh_utils.create_hybrid_device_mesh(
        tuple(part.values()), outer, TWO_SLICES, allow_split_physical_axes=True
    )
    number = np.vectorize(lambda one: one.slice_index)
    np.testing.assert_array_equal(number(found.devices), number(hybrid))
    for index, half in enumerate(np.split(found.devices, 2, axis=list(AXES).index(dcn))):
        np.testing.assert_array_equal(half, make_mesh(part, devices_of("v5litepod-16", index)).devices)


@pytest.mark.parametrize(("dcn", "sizes"), [("dp", {"dp": 2, "fsdp": 4}), ("pp", {"pp": 2, "fsdp": 4})])
def test_processes_of_two_slices_read_different_rows_if_the_batch_crosses_them(dcn, sizes):
    config = MeshConfig(dcn=dcn, tp=4, **sizes)
    mesh = make_hybrid_mesh(config, config.shape(32), platforms.by_slice(TWO_SLICES))
    sharding = Partition(mesh, training_rules(config)).sharding("batch", None)
    rows = [process_rows(sharding, 8, process) for process in range(8)]
    assert all(len(held) == (1 if dcn == "dp" else 2) for held in rows)
    assert (rows[:4] == rows[4:]) == (dcn == "pp")
    assert set().union(*map(set, rows)) == set(range(8))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 4}, "the devices belong to 2 slices.*set mesh.dcn .*mesh.dcn=dp, or mesh.dcn=pp"),
        ({"fsdp": 8, "tp": 4, "dcn": "dp"}, "mesh.dp 1 is not divisible by the 2 slices.*mesh.dcn=pp and mesh.pp to"),
        ({"pp": 1, "dp": 8, "tp": 4, "dcn": "pp"}, "mesh.pp 1 is not divisible.*or set mesh.dcn=dp$"),
    ],
)
def test_several_slices_need_an_axis_that_they_divide(fields, words):
    mesh = MeshConfig(**fields)
    with pytest.raises(UserError, match=words):
        make_hybrid_mesh(mesh, mesh.shape(32), platforms.by_slice(TWO_SLICES))


def test_slices_of_different_sizes_are_refused():
    with pytest.raises(UserError, match=r"slices of the same size; devices by slice: \[16, 8\]"):
        make_hybrid_mesh(MeshConfig(dcn="dp"), mesh_shape(dp=24), platforms.by_slice(TWO_SLICES[:24]))


def test_elsewhere_consecutive_processes_are_a_slice(monkeypatch):
    devices = [dataclasses.replace(one, platform="cpu", slice_index=0) for one in TWO_SLICES]
    assert platforms.by_slice(devices) == [devices]
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    assert platforms.by_slice(devices) == [devices[:16], devices[16:]]
    assert platforms.by_slice(TWO_SLICES[:16]) == [TWO_SLICES[:16]]
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "two")
    with pytest.raises(UserError, match="MEGASCALE_NUM_SLICES 'two'"):
        platforms.by_slice(devices)
