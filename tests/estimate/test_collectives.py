"""The ring model of collectives, by hand, and the groups of devices in the text of a program."""

import itertools

import pytest

from mesh_transformer.accelerators import ACCELERATORS
from mesh_transformer.estimate.collectives import HOP_S, DeviceGroup, collective_seconds, device_group

MEBIBYTE = 1 << 20


@pytest.mark.parametrize(
    ("attributes", "size", "stride"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", 4, 1),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 2, 4),
        ("replica_groups=[2,4]<=[8]", 4, 1),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2, 4),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=8] {'axis_1'}", 8, 1),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=8] {'axis_0'}", 4, 8),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=8] {'axis_0','axis_1'}", 32, 1),
        ("source_target_pairs={{0,1},{1,2},{2,0}}", 2, 1),
        ("to_apply=%add", 1, 1),
    ],
)
def test_groups(attributes, size, stride):
    assert device_group(attributes) == DeviceGroup(size, stride)


def test_a_ring_over_both_directions():
    """v5e, 8 chips in a row: an all-gather of 1 MiB receives 7/8 of it over two links of 45 GB/s."""
    v5e = ACCELERATORS["v5e"]
    gather = collective_seconds("all-gather", MEBIBYTE, DeviceGroup(8, 1), v5e)
    assert gather == pytest.approx(7 / 8 * MEBIBYTE / 90e9 + 8 * HOP_S)
    reduce = collective_seconds("all-reduce", MEBIBYTE, DeviceGroup(8, 1), v5e)
    assert reduce - 8 * HOP_S == pytest.approx(2 * (gather - 8 * HOP_S))


def test_the_two_cores_of_a_chip_share_its_links():
    """v3: the four chips of an inner group of 8 cores; an outer group of 4 cores has half the rate."""
    v3 = ACCELERATORS["v3"]
    hops = 4 * HOP_S
    inner = collective_seconds("all-gather", MEBIBYTE, DeviceGroup(8, 1), v3) - hops - 3 * MEBIBYTE / 450e9
    outer = collective_seconds("all-gather", MEBIBYTE, DeviceGroup(4, 8), v3) - hops
    assert inner == pytest.approx(3 / 4 * MEBIBYTE / 164e9)
    assert outer == pytest.approx(2 * inner)
    one_chip = collective_seconds("all-gather", MEBIBYTE, DeviceGroup(2, 1), v3)
    assert one_chip == pytest.approx(2 * MEBIBYTE / 450e9)


@pytest.mark.parametrize(
    ("name", "chips", "rings"), [("v4", 16, 1), ("v4", 32, 1), ("v4", 64, 3), ("v5e", 64, 1), ("v5e", 256, 2)]
)
def test_a_closed_torus_sums_along_rings_in_all_dimensions(name, chips, rings):
    """v4-64 has 2 x 4 x 4 chips, whose links end at the sides. v4-128 has 4 x 4 x 4, whose links go round."""
    accelerator, large = ACCELERATORS[name], 1 << 30
    ring = (chips - 1) / chips * large / (2e9 * accelerator.link_gb_s)
    seconds = {
        kind: collective_seconds(kind, large, DeviceGroup(chips, 1), accelerator) - chips * HOP_S
        for kind in ("all-reduce", "all-gather", "reduce-scatter")
    }
    assert seconds["all-reduce"] == pytest.approx(2 * ring / rings)
    assert seconds["all-gather"] == pytest.approx(ring)
    assert seconds["reduce-scatter"] == pytest.approx(min(ring, seconds["all-reduce"]))


@pytest.mark.parametrize(
    ("chips", "sides", "closed"), [(2, (2,), True), (8, (8,), True), (16, (4, 4), False), (256, (16, 16), True)]
)
def test_chips_pass_on_the_parts_of_an_all_to_all(chips, sides, closed):
    """The parts that cross the middle of the slice, over the links there. A ring has two middles."""
    v5e, side = ACCELERATORS["v5e"], sides[0]
    places = list(itertools.product(*map(range, sides)))
    crossing = sum(one[0] < side // 2 <= other[0] for one in places for other in places)
    links = (2 if closed else 1) * len(places) / side
    seconds = crossing * MEBIBYTE / chips / (links * 1e9 * v5e.link_gb_s)
    found = collective_seconds("all-to-all", MEBIBYTE, DeviceGroup(chips, 1), v5e)
    assert found == pytest.approx(seconds + chips * HOP_S)


def test_one_device_sends_nothing():
    assert collective_seconds("all-reduce", MEBIBYTE, DeviceGroup(1, 1), ACCELERATORS["v4"]) == 0
