"""The table of TPU types: the hosts, chips, cores, topology, memory and JAX devices of a type such as `v3-32`.

Sources: Google's pages on each generation (cloud.google.com/tpu/docs/v2 ... v6e, tpu7x) and on software versions
(cloud.google.com/tpu/docs/runtimes). The number in the name of a type counts cores; for v5e and v6e it counts chips.
"""

import re
from dataclasses import dataclass

from mesh_transformer.errors import UserError, plural

# in a name such as 2xv5e-16
MAX_SLICES = 256
# in every slice of several hosts
CHIPS_PER_HOST = 4
_PLANE = {
    1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16", 512: "16x32",
    1024: "32x32",
}  # fmt: skip
_SPACE = {
    4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8",
    1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16", 6144: "16x16x24",
}  # fmt: skip


@dataclass(frozen=True)
class Generation:
    """The properties that all slices of one TPU generation share."""

    # the common name
    name: str
    # the name in accelerator types of the Cloud TPU API
    api_name: str
    cores_per_chip: int
    # JAX devices: v4 and v5p join the two cores of a chip
    devices_per_chip: int
    memory_gib_per_chip: int
    # the number in the name of a type counts chips, not cores
    counts_chips: bool
    # number of chips to topology
    topologies: dict[int, str]
    # numbers of chips of the slices that exist
    sizes: tuple[int, ...]
    # software of a TPU VM for JAX; None: the Cloud TPU API does not create this generation
    runtime_version: str | None

    @property
    def multislice(self) -> bool:
        """Whether a program can run on several slices: Google's Multislice begins with v4."""
        return self.name not in ("v2", "v3")

    @property
    def types(self) -> list[str]:
        """The accelerator types of this generation, smallest first."""
        count = 1 if self.counts_chips else self.cores_per_chip
        return [f"{self.api_name}-{chips * count}" for chips in self.sizes]


_TO_V4 = "tpu-ubuntu2204-base"
_EIGHT_ON_A_HOST = (1, 4, 8, 16, 32, 64, 128, 256)
GENERATIONS = (
    Generation("v2", "v2", 2, 2, 16, False, _PLANE, (4, 16, 64, 128, 256), _TO_V4),
    Generation("v3", "v3", 2, 2, 32, False, _PLANE, (4, 16, 32, 64, 128, 256, 512, 1024), _TO_V4),
    Generation("v4", "v4", 2, 1, 32, False, _SPACE, tuple(_SPACE)[:-1], _TO_V4),
    Generation("v5e", "v5litepod", 1, 1, 16, True, _PLANE, _EIGHT_ON_A_HOST, "v2-alpha-tpuv5-lite"),
    Generation("v5p", "v5p", 2, 1, 95, False, _SPACE, tuple(_SPACE), "v2-alpha-tpuv5"),
    Generation("v6e", "v6e", 1, 1, 32, True, _PLANE, _EIGHT_ON_A_HOST, "v2-alpha-tpuv6e"),
    Generation("v7x", "tpu7x", 2, 2, 192, False, _SPACE, tuple(_SPACE)[:-2], None),
)
_BY_NAME = {name: generation for generation in GENERATIONS for name in (generation.name, generation.api_name)}


@dataclass(frozen=True)
class SliceType:
    """One accelerator type."""

    # the name in the Cloud TPU API
    name: str
    generation: Generation
    chips: int

    @property
    def cores(self) -> int:
        """TensorCores of the slice."""
        return self.chips * self.generation.cores_per_chip

    @property
    def devices(self) -> int:
        """JAX devices of the slice."""
        return self.chips * self.generation.devices_per_chip

    @property
    def hosts(self) -> int:
        """Hosts of the slice. Each runs one process."""
        return self.chips // self.chips_per_host

    @property
    def chips_per_host(self) -> int:
        """Chips of one host: up to eight for a v5e or v6e slice of one host, else four."""
        largest_host = 8 if self.generation.counts_chips else CHIPS_PER_HOST
        return self.chips if self.chips <= largest_host else CHIPS_PER_HOST

    @property
    def topology(self) -> str:
        """The arrangement of the chips, such as 2x2x4."""
        return self.generation.topologies[self.chips]

    @property
    def memory_gib_per_device(self) -> float:
        """HBM of one JAX device, GiB."""
        return self.generation.memory_gib_per_chip / self.generation.devices_per_chip

    @property
    def memory_gib(self) -> int:
        """HBM of the slice, GiB."""
        return self.generation.memory_gib_per_chip * self.chips

    @property
    def runtime_version(self) -> str:
        """The TPU VM software version for JAX.

        Raises:
            UserError: the Cloud TPU API does not create this type.
        """
        if self.generation.runtime_version is None:
            raise UserError(
                f"{self.name}: the Cloud TPU API creates TPUs up to v6e; create a {self.generation.name} slice with "
                "Google Kubernetes Engine or Compute Engine, and use a Ray cluster on it (docs/pod.md)"
            )
        return self.generation.runtime_version

    def __str__(self) -> str:
        return (
            f"{self.name}: {plural(self.hosts, 'host')}, {plural(self.chips, 'chip')} ({self.topology}), "
            f"{plural(self.cores, 'core')}, {plural(self.devices, 'JAX device')} of {self.memory_gib_per_device:g} GiB"
        )


def several(name: str) -> tuple[int, SliceType]:
    """The number of slices of a name such as `2xv5e-16`, and the type of each; `v5e-16` is one slice.

    Raises:
        UserError: the number or the type is unknown.
    """
    count, separator, type_name = name.strip().partition("x")
    # a type such as v7x-8 has an x too
    if not separator or not count.isdigit():
        return 1, parse(name)
    if not 1 <= int(count) <= MAX_SLICES:
        raise UserError(f"{name!r}: expected 1 to {MAX_SLICES} slices, such as 2xv5e-16")
    kind = parse(type_name)
    check_count(kind, int(count))
    return int(count), kind


def parse(name: str) -> SliceType:
    """The accelerator type of a name such as `v3-32`, `v5e-16` (or `v5litepod-16`) or `v6e-8`.

    Raises:
        UserError: the type is unknown.
    """
    match = re.fullmatch(r"([a-z0-9]+)-([0-9]+)", name.strip().lower())
    generation = _BY_NAME.get(match[1]) if match else None
    if match is None or generation is None:
        known = ", ".join(generation.name for generation in GENERATIONS)
        raise UserError(f"unknown TPU type {name!r}: give a generation and a size, such as v3-8 ({known})")
    number, cores = int(match[2]), 1 if generation.counts_chips else generation.cores_per_chip
    if number % cores or number // cores not in generation.sizes:
        unit = "chips" if generation.counts_chips else "cores"
        raise UserError(
            f"unknown TPU type {name!r}: {generation.name} slices by {unit} are {', '.join(generation.types)}"
        )
    return SliceType(f"{generation.api_name}-{number}", generation, number // cores)


def check_count(kind: SliceType, count: int) -> None:
    """Raises UserError if a program cannot run on `count` slices of this type."""
    if count < 1:
        raise UserError(f"--slices {count}: must be 1 or more")
    if count > 1 and not kind.generation.multislice:
        raise UserError(
            f"{counted(kind.name, count)}: one program runs on several slices of v4 or later only: give another type, "
            "such as v4-16"
        )


def counted(type_name: str, slices: int) -> str:
    """The name of a number of slices of a type: v4-16, 2xv4-16."""
    return type_name if slices == 1 else f"{slices}x{type_name}"
