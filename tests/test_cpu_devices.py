"""The threads of JAX's CPU client for virtual devices."""

import os

import pytest

from mesh_transformer.cpu_devices import give_threads


@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [
        ("--xla_force_host_platform_device_count=8", None, "32"),
        ("--a=1 --xla_force_host_platform_device_count=2 --xla_force_host_platform_device_count=4", None, "16"),
        ("--xla_force_host_platform_device_count=8", "5", "5"),
        ("--xla_force_host_platform_device_count=1", None, None),
        ("", None, None),
    ],
)
def test_virtual_devices_get_threads(monkeypatch, flags: str, given: str | None, expected: str | None) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("PJRT_NPROC", given or "")
    if given is None:
        monkeypatch.delenv("PJRT_NPROC")
    give_threads()
    assert os.environ.get("PJRT_NPROC") == expected
