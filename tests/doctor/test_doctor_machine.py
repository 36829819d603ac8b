"""Faults of the machine: memory, cores, disks, ports, variables of the environment."""

import inspect
import os
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
from support.doctored import findings, problems

from mesh_transformer import host_memory
from mesh_transformer.cloud import head
from mesh_transformer.commands import serve
from mesh_transformer.doctor import machine, settings


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 10, 14), (3, 15, 0)])
def test_a_python_that_is_not_supported(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...]) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    (fault,) = problems("python")
    assert ".".join(map(str, version)) in fault.found
    assert "3.11 to 3.14 is needed" in fault.found


def test_another_environment_is_activated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    (fault,) = problems("python", "warning")
    assert str(tmp_path) in fault.found
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert [line.level for line in findings("python")] == ["ok"]


@pytest.mark.parametrize(("kilobytes", "level"), [(1_000_000, "warning"), (9_000_000, "ok")])
def test_the_free_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kilobytes: int, level: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable:    {kilobytes} kB\n")
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    (line,) = findings("memory")
    assert (line.level, line.found[:7]) == (level, "1.02 GB" if level == "warning" else "9.22 GB")


def test_a_container_with_less_time_than_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 1.0, 1.0))
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert findings("cores") == [("ok", "8 cores, load 1", "")]
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("150000 100000\n")
    (line,) = findings("cores")
    assert (line.level, line.found) == ("warning", "8 cores, but the control group allows the time of 1.5")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    monkeypatch.setattr(os, "getloadavg", lambda: (20.0, 20.0, 20.0))
    (line,) = findings("cores")
    assert (line.level, line.mend) == ("warning", "end other programs: top")


def test_the_size_of_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a").write_bytes(bytes(3000))
    # a link of a snapshot to a blob does not count again
    (tmp_path / "link").symlink_to(tmp_path / "blobs" / "a")
    (line,) = [line for line in findings("folders") if line.found.startswith("Hugging Face hub")]
    assert re.match(rf"Hugging Face hub: {tmp_path} has 3\.\d+ kB, ", line.found)


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (fault,) = problems("folders")
    assert fault.found == f"compiled programs: {tmp_path}/file/cache cannot be written"
    assert fault.mend == "export JAX_COMPILATION_CACHE_DIR=FOLDER of another disk"


@pytest.mark.parametrize(("free", "level"), [(10**8, "problem"), (5 * 10**9, "warning"), (10**11, "ok")])
def test_a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch, free: int, level: str) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    assert {line.level for line in findings("folders")} == {level}


def test_a_port_that_another_program_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PORTS", {})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setitem(machine.PORTS, port, ("serve", "add --port 5001 to serve"))
        (fault,) = problems("ports", "warning")
        assert fault == ("warning", f"{port} (serve) is taken by another program", "add --port 5001 to serve")
    assert findings("ports") == [("ok", f"{port} (serve): free", "")]


def test_the_port_of_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PORTS", {})
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("JAX_PROCESS_ID", "1")
        assert not findings("ports")
        monkeypatch.setenv("JAX_PROCESS_ID", "0")
        (fault,) = problems("ports", "warning")
        assert "JAX's coordinator" in fault.found


def test_the_ports_are_those_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    port = re.search(r"--port [^(]*\(default: (\d+)\)", capsys.readouterr().out)
    assert port is not None
    assert {int(port[1]), inspect.signature(head.start).parameters["port"].default} == set(machine.PORTS)


@pytest.mark.parametrize(
    ("name", "value", "surprises"),
    [
        ("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8", True),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=1", False),
        ("XLA_FLAGS", "--xla_dump_to=/tmp/a", True),
        ("JAX_PLATFORM_NAME", "cpu", True),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5", True),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", True),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "true", False),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", True),
        ("CUDA_VISIBLE_DEVICES", "", True),
        ("TPU_VISIBLE_CHIPS", "0", True),
        ("TPU_VISIBLE_DEVICES", "0", True),
        ("LD_LIBRARY_PATH", "/usr/lib:/usr/local/cuda-12/lib64", True),
        ("LD_LIBRARY_PATH", "/opt/lib", False),
        ("JAX_ENABLE_X64", "True", True),
        ("JAX_ENABLE_X64", "0", False),
        ("JAX_DISABLE_JIT", "1", True),
        ("JAX_DEBUG_NANS", "1", True),
        ("JAX_ENABLE_COMPILATION_CACHE", "false", True),
        ("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234", True),
        ("HF_HUB_OFFLINE", "1", True),
    ],
)
def test_variables_that_surprise(monkeypatch: pytest.MonkeyPatch, name: str, value: str, surprises: bool) -> None:
    for other, *_ in settings._SETTINGS:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    assert [line.mend for line in findings("settings")] == [f"unset {name}" if surprises else ""]


def test_every_variable_of_the_table_is_tested() -> None:
    cases = test_variables_that_surprise.pytestmark[0].args[1]
    assert {name for name, _, surprises in cases if surprises} == {name for name, *_ in settings._SETTINGS}
