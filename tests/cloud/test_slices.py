"""The table of TPU types against Google's published figures, and the message for a wrong name."""

import pytest

from mesh_transformer import slices
from mesh_transformer.errors import UserError

# name, hosts, chips, cores, JAX devices, topology, GiB a device, runtime version: from cloud.google.com/tpu/docs
PUBLISHED = [
    ("v2-8", 1, 4, 8, 8, "2x2", 8, "tpu-ubuntu2204-base"),
    ("v3-8", 1, 4, 8, 8, "2x2", 16, "tpu-ubuntu2204-base"),
    ("v3-32", 4, 16, 32, 32, "4x4", 16, "tpu-ubuntu2204-base"),
    ("v3-256", 32, 128, 256, 256, "8x16", 16, "tpu-ubuntu2204-base"),
    ("v4-8", 1, 4, 8, 4, "2x2x1", 32, "tpu-ubuntu2204-base"),
    ("v4-512", 64, 256, 512, 256, "4x8x8", 32, "tpu-ubuntu2204-base"),
    ("v5litepod-8", 1, 8, 8, 8, "2x4", 16, "v2-alpha-tpuv5-lite"),
    ("v5litepod-16", 4, 16, 16, 16, "4x4", 16, "v2-alpha-tpuv5-lite"),
    ("v5p-128", 16, 64, 128, 64, "4x4x4", 95, "v2-alpha-tpuv5"),
    ("v5p-12288", 1536, 6144, 12288, 6144, "16x16x24", 95, "v2-alpha-tpuv5"),
    ("v6e-1", 1, 1, 1, 1, "1x1", 32, "v2-alpha-tpuv6e"),
    ("v6e-256", 64, 256, 256, 256, "16x16", 32, "v2-alpha-tpuv6e"),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_published_figures(row: tuple) -> None:
    kind = slices.parse(row[0])
    assert (
        kind.name, kind.hosts, kind.chips, kind.cores, kind.devices, kind.topology, kind.memory_gib_per_device,
        kind.runtime_version,
    ) == row  # fmt: skip


def every_type() -> list[slices.SliceType]:
    return [slices.parse(name) for generation in slices.GENERATIONS for name in generation.types]


@pytest.mark.parametrize("kind", every_type(), ids=lambda kind: kind.name)
def test_figures_agree(kind: slices.SliceType) -> None:
    product = 1
    for length in kind.topology.split("x"):
        product *= int(length)
    assert product == kind.chips == kind.hosts * kind.chips_per_host
    assert kind.devices == kind.hosts * (kind.devices // kind.hosts)
    assert kind.memory_gib == kind.devices * kind.memory_gib_per_device
    assert slices.parse(str(kind).split(":")[0]) == kind


def test_both_spellings() -> None:
    assert slices.parse("v5e-16") == slices.parse(" V5LITEPOD-16")


def test_several_slices() -> None:
    assert slices.several(" 2xv5e-16") == (2, slices.parse("v5e-16"))
    assert slices.several("v7x-16") == (1, slices.parse("v7x-16"))


@pytest.mark.parametrize(
    ("name", "words"),
    [("0xv5e-16", "expected 1 to 256 slices"), ("2xv3-7", "unknown TPU type 'v3-7'"), ("2xv3-8", "v4 or later")],
)
def test_slices_that_do_not_exist(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        slices.several(name)


@pytest.mark.parametrize("name", ["v3-12", "v3-7", "v9-8", "v3", "v3-8-8", "", "v6e-3", "v4-12288", "tpu-v3-8"])
def test_unknown_type(name: str) -> None:
    with pytest.raises(UserError, match="unknown TPU type") as refusal:
        slices.parse(name)
    assert repr(name) in str(refusal.value)


def test_types_beyond_the_api() -> None:
    kind = slices.parse("v7x-16")
    assert (kind.name, kind.hosts, kind.memory_gib_per_device) == ("tpu7x-16", 2, 96)
    with pytest.raises(UserError, match="Kubernetes"):
        _ = kind.runtime_version
