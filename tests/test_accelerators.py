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
