"""The table of accelerators."""

import pytest

from mesh_transformer import accelerators, slices


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "v7x"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
    ],
)
def test_the_accelerator_of_a_device(device_kind, name):
    found = accelerators.of_device(device_kind)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4090", "rtx4090"),
        ("5090", "rtx5090"),
        ("Tesla T4", "t4"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("mi300x", "mi300x"),
        ("rtx", None),
        ("A100-PCIE-40GB", None),
        ("", None),
    ],
)
def test_the_name_of_a_gpu(text, name):
    assert accelerators.gpu_name(text) == name


@pytest.mark.parametrize("device_kind", ["NVIDIA A100-PCIE-40GB", "NVIDIA GeForce RTX 4090 D", "NVIDIA L40S"])
def test_a_card_with_a_similar_name_is_another(device_kind):
    assert accelerators.of_device(device_kind) is None


def test_each_device_has_a_network():
    """A table of operations divides by it."""
    assert all(accelerator.link_gb_s > 0 for accelerator in accelerators.ACCELERATORS.values())


def test_an_unknown_device_has_no_peak():
    assert accelerators.of_device("cpu") is None


def test_every_tpu_generation_is_in_the_table():
    for generation in slices.GENERATIONS:
        found = accelerators.ACCELERATORS[generation.name]
        assert found.is_tpu
        assert found.devices_per_chip == generation.devices_per_chip
        # the compiler keeps a part of the memory
        assert 0.9 < found.usable_gib / (generation.memory_gib_per_chip / generation.devices_per_chip) <= 1.01
        assert found.torus == max(len(t.split("x")) for t in generation.topologies.values())
