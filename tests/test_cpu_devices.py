"""The threads of JAX's CPU client for virtual devices."""

import os

import pytest

from mesh_transformer.cpu_devices import give_threads, threads


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


@pytest.mark.parametrize(
    ("variables", "devices", "expected"),
    [
        ({"PJRT_NPROC": "5", "NPROC": "9"}, 2, 5),
        ({"NPROC": "9"}, 2, 9),
        ({"PJRT_NPROC": "1"}, 8, 8),
        ({"PJRT_NPROC": "0"}, 1, 1),
        ({"PJRT_NPROC": "-3"}, 1, 1),
        ({"PJRT_NPROC": "4.0"}, 500, 500),
        ({"PJRT_NPROC": "abc", "NPROC": "7"}, 1, 7),
        ({}, 500, 500),
    ],
)
def test_the_threads_of_the_client(monkeypatch, variables: dict[str, str], devices: int, expected: int) -> None:
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert threads(devices) == expected
