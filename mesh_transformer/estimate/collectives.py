"""The time of a collective on a torus of TPU chips or between slices, and the groups of devices between which it runs.

Model: rings over both directions of a torus dimension. On one of n devices, an all-gather or a reduce-scatter sends
(n - 1) / n of the whole array, an all-reduce twice as much (Thakur, Rabenseifner and Gropp 2005, "Optimization of
collective communication operations in MPICH"). In an all-to-all each part goes to one device, the shorter way round: a
quarter of a ring on average, in each dimension. The chips on its way pass it on. Where a torus is closed, libtpu sums
along rings in all dimensions at once. It gathers and scatters along one ring (docs/preflight.md).
"""

import math
import re
from typing import NamedTuple

from mesh_transformer.accelerators import Accelerator

# parts of the array that a device sends, in units of (n - 1) / n of it
_SENT = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "collective-broadcast": 1.0}
_ALL_TO_ALLS = ("all-to-all", "ragged-all-to-all")
# the parts that a device sends between slices, whose network is no torus
_SENT_BETWEEN_SLICES = {**_SENT, **dict.fromkeys(_ALL_TO_ALLS, 1.0)}
# to start a transfer to a neighbour
HOP_S = 2e-6
# a group of so many chips or more is a block of the torus in two, or three, dimensions
PLANE_CHIPS, SPACE_CHIPS = 16, 64


class DeviceGroup(NamedTuple):
    """The devices between which one collective runs.

    Args:
        size: number of devices.
        stride: difference of the numbers of neighbours: 1 for the innermost mesh axis.
    """

    size: int
    stride: int


def device_group(attributes: str) -> DeviceGroup:
    """The group of an instruction, from its attribute `replica_groups`. Without one, a group of one device."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        ids = [int(number) for number in listed[1].split(",")]
        return DeviceGroup(len(ids), ids[1] - ids[0] if len(ids) > 1 else 1)
    if by_axes := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        by_name = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", by_axes[1])}
        return _of_axes(by_name, set(re.findall(r"'(\w+)'", by_axes[2])))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        sizes = [int(number) for number in iota[2].split(",")]
        last = int(iota[3].split(",")[-1]) if iota[3] else len(sizes) - 1
        return DeviceGroup(int(iota[1]), math.prod(sizes[last + 1 :]))
    # a permutation: to the next device of a ring
    if pair := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes):
        return DeviceGroup(2, max(abs(int(pair[2]) - int(pair[1])), 1))
    return DeviceGroup(1, 1)


def _of_axes(sizes: dict[str, int], chosen: set[str]) -> DeviceGroup:
    names = list(sizes)
    inner = [place for place, name in enumerate(names) if name in chosen and sizes[name] > 1]
    stride = math.prod(sizes[name] for name in names[inner[-1] + 1 :]) if inner else 1
    return DeviceGroup(math.prod(sizes[name] for name in chosen), stride)


def collective_seconds(kind: str, n_bytes: int, group: DeviceGroup, accelerator: Accelerator) -> float:
    """Seconds of a collective while nothing else uses the links.

    Args:
        kind: of `hlo.KINDS`.
        n_bytes: of the whole array on one device: the larger of what it reads and what it yields.
    """
    if group.size <= 1 or not n_bytes:
        return 0.0
    rate = 1e9 * accelerator.link_gb_s
    if kind == "collective-permute":
        return n_bytes / rate + HOP_S / 2
    adjacent = group.stride == 1
    # neighbours in an innermost group are the devices of one chip, which exchange data through its memory
    chips = max(group.size // (accelerator.devices_per_chip if adjacent else 1), 1)
    through_memory = n_bytes / (1e9 * accelerator.memory_gb_s)
    if chips == 1:
        return 2 * through_memory
    dimensions = 1 if not adjacent or chips < PLANE_CHIPS else 2
    if accelerator.torus == 3 and adjacent and chips >= SPACE_CHIPS:
        dimensions = 3
    closed = chips >= accelerator.closed_torus
    # devices of one chip that belong to different groups use its links at once
    sharing = 1 if adjacent else accelerator.devices_per_chip
    if kind in _ALL_TO_ALLS:
        # an open row of chips has half the links of a ring between its two halves
        sent = chips ** (1 / dimensions) / (4 if dimensions == 1 or closed else 2)
    else:
        sent = _sent_in_a_ring(kind, dimensions if closed else 1) * (chips - 1) / chips
    between_chips = sent * n_bytes * sharing / (2 * rate)
    inside_chips = 3 * through_memory if adjacent and accelerator.devices_per_chip > 1 else 0.0
    return between_chips + inside_chips + HOP_S * chips


def _sent_in_a_ring(kind: str, rings: int) -> float:
    """What a ring carries, in units of (n - 1) / n of the array. An all-reduce uses all of the rings between a group.

    libtpu replaces a reduce-scatter by an all-reduce where that is faster.
    """
    summed = _SENT["all-reduce"] / rings
    if kind == "all-reduce":
        return summed
    return min(_SENT[kind], summed) if kind == "reduce-scatter" else _SENT[kind]


def slice_seconds(kind: str, n_bytes: int, slices: int, accelerator: Accelerator) -> float:
    """Seconds of a collective between slices, in which each device uses its share of the network of its host. Delays
    are not counted. 0 if the rate of the network is not known.

    Args:
        kind, n_bytes: as in `collective_seconds`.
    """
    if not accelerator.dcn_gb_s:
        return 0.0
    sent = 1.0 if kind == "collective-permute" else _SENT_BETWEEN_SLICES[kind] * (slices - 1) / slices
    return sent * n_bytes / (1e9 * accelerator.dcn_gb_s)
