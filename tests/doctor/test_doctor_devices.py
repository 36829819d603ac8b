"""Faults of drivers and devices: programs named nvidia-smi and modules named jax that behave as the real ones do."""

from pathlib import Path

import pytest
from support.doctored import findings, prepend, problems, write_jax, write_package, write_program
from support.driving import is_running
from support.waiting import until

from mesh_transformer.doctor import accelerators, child

H100 = "NVIDIA H100 80GB HBM3, {driver}, 9.0, 81559, {used}"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders for packages and programs that come first, and no variables that choose devices."""
    monkeypatch.syspath_prepend(str(tmp_path))
    prepend(monkeypatch, "PATH", tmp_path / "bin")
    prepend(monkeypatch, "PYTHONPATH", tmp_path)
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def with_gpus(machine: Path, *lines: str) -> None:
    write_program(machine / "bin", "nvidia-smi", "cat <<'END'\n" + "\n".join(lines) + "\nEND")


@pytest.mark.parametrize(
    ("cuda", "driver", "mends"),
    [
        (13, "580.65.06", []),
        (13, "575.57.08", ["pip install 'jax[cuda12]'"]),
        (12, "525.60.13", []),
        (12, "470.82", ["newer driver (nvidia.com/drivers)"]),
    ],
)
def test_a_driver_too_old_for_the_plugin(machine: Path, cuda: int, driver: str, mends: list[str]) -> None:
    with_gpus(machine, H100.format(driver=driver, used=4))
    write_package(machine, f"jax-cuda{cuda}-plugin", "0.10.2")
    found = problems("nvidia")
    assert len(found) == len(mends)
    for fault, mend in zip(found, mends, strict=True):
        assert f"driver {driver} is too old for the plugin for CUDA {cuda}" in fault.found
        assert fault.mend.endswith(mend)


def test_the_gpus_and_who_uses_them(machine: Path) -> None:
    with_gpus(machine, H100.format(driver="580.65.06", used=70_000), H100.format(driver="580.65.06", used=4))
    line, busy = findings("nvidia")
    assert line.found == "2 x NVIDIA H100 80GB HBM3, 81,559 MiB each, driver 580.65.06"
    assert (busy.level, busy.found) == ("warning", "other programs hold memory of 1 GPU, up to 70,000 MiB")


def test_a_gpu_that_cuda_13_has_dropped(machine: Path) -> None:
    with_gpus(machine, "Tesla V100-SXM2-16GB, 580.65.06, 7.0, 16384, 4")
    write_package(machine, "jax-cuda13-plugin", "0.10.2")
    (fault,) = problems("nvidia")
    assert "compute capability 7.0, but CUDA 13 needs 7.5" in fault.found


def test_a_driver_that_fails(machine: Path) -> None:
    message = "Failed to initialize NVML: Driver/library version mismatch"
    write_program(machine / "bin", "nvidia-smi", f"echo '{message}'; exit 18")
    (fault,) = problems("nvidia")
    assert message in fault.found


def test_a_driver_that_hangs_is_left_alone(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(machine / "bin", "nvidia-smi", f"sleep 100 & echo $! > {machine}/pid; wait")
    monkeypatch.setattr(accelerators, "SMI_S", 1.0)
    (fault,) = problems("nvidia")
    assert "does not end" in fault.found
    until(lambda: not is_running(int((machine / "pid").read_text())))


def test_the_kernel_has_a_driver_but_there_is_no_program(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(machine))
    assert not problems("nvidia")
    monkeypatch.setattr(accelerators, "DRIVER_FILE", machine)
    (fault,) = problems("nvidia")
    assert fault.mend.endswith("docker run --gpus all")


def with_tpus(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four chips of v4, beside a network card of the same vendor."""
    for number, device in enumerate(("0x005e", "0x005e", "0x005e", "0x005e", "0x0042")):
        place = machine / "pci" / str(number)
        place.mkdir(parents=True)
        (place / "vendor").write_text("0x1ae0\n")
        (place / "device").write_text(f"{device}\n")
    monkeypatch.setattr(accelerators, "PCI", machine / "pci")


@pytest.mark.usefixtures("no_libtpu")
def test_tpu_chips_without_libtpu(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tpus(machine, monkeypatch)
    line, fault = findings("tpu")
    assert line.found == "4 chips v4"
    assert (fault.level, fault.mend) == ("problem", "pip install -e '.[tpu]'")
    write_package(machine, "libtpu", "0.0.42.1")
    assert not problems("tpu")


def test_jax_opens_its_devices(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    assert [line.found for line in findings("devices", 120)] == ["3 x cpu"]


def test_jax_does_not_know_a_flag(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    (fault,) = findings("devices", 120)
    assert fault.level == "problem"
    assert "--xla_no_such_flag=1" in fault.found
    assert fault.mend.startswith("unset XLA_FLAGS")


def test_the_memory_of_devices(machine: Path) -> None:
    write_jax(
        machine,
        "class Device:\n"
        "    platform, device_kind = 'tpu', 'TPU v4'\n"
        "    memory_stats = lambda self: {'bytes_limit': 33_000_000_000}\n"
        "print('a plugin says hello')\n"
        "local_devices = lambda: [Device()] * 4\n",
    )
    (line,) = findings("devices")
    assert line == ("ok", "4 x tpu (TPU v4), 33 GB for programs on each", "")


@pytest.mark.parametrize(
    ("code", "found", "mend"),
    [
        (
            "raise RuntimeError(\"Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process "
            'with pid 4321. Not attempting to load libtpu.so in this process.")',
            "already in use by process with pid 4321",
            "ps -fp 4321 shows the process: end it, or wait for its end",
        ),
        (
            "raise RuntimeError('ABORTED: Internal error when accessing libtpu multi-process lockfile. Run ...')",
            "libtpu multi-process lockfile",
            "rm /tmp/libtpu_lockfile",
        ),
        ("import no_such_module", "No module named 'no_such_module'", "see the lines about packages"),
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11", "prints all of the error"),
    ],
    ids=["held", "lock file", "broken package", "crash"],
)
def test_jax_fails(machine: Path, code: str, found: str, mend: str) -> None:
    write_jax(machine, code)
    (fault,) = findings("devices")
    assert fault.level == "problem"
    assert found in fault.found
    assert mend in fault.mend


def test_a_platform_that_is_not_there(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    # as JAX 0.10.2 does: no text
    write_jax(machine, "assert False")
    (fault,) = findings("devices")
    assert "JAX_PLATFORMS=cuda: AssertionError" in fault.found
    assert fault.mend == "unset JAX_PLATFORMS, or pip install -e '.[cuda]'"


def test_jax_that_hangs_is_ended_with_its_children(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jax(
        machine,
        "import pathlib, subprocess\n"
        "held = subprocess.Popen(['sleep', '1000'])\n"
        f"pathlib.Path({str(machine / 'pid')!r}).write_text(str(held.pid))\n"
        "held.wait()\n",
    )
    (fault,) = findings("devices", 3)
    assert fault.found == "JAX did not open its devices in 3 s"
    assert "--timeout" in fault.mend
    until(lambda: not is_running(int((machine / "pid").read_text())))
    with_tpus(machine, monkeypatch)
    (fault,) = findings("devices", 0.1)
    assert "on all hosts at the same time" in fault.mend


def test_hardware_that_jax_leaves_out(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jax(machine)
    assert not problems("devices")
    with_gpus(machine, H100.format(driver="580.65.06", used=4))
    (fault,) = problems("devices")
    assert fault.mend == "pip install -e '.[cuda]'"
    with_tpus(machine, monkeypatch)
    assert [fault.mend for fault in problems("devices")] == ["pip install -e '.[tpu]'", "pip install -e '.[cuda]'"]
    # who asks for the CPU gets it, with a warning of another check
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not problems("devices")
    (warned,) = problems("settings", "warning")
    assert warned.mend == "unset JAX_PLATFORMS"


def test_the_child_does_not_take_the_memory_of_a_gpu(machine: Path) -> None:
    write_jax(machine, "import os; raise SystemExit(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])")
    (fault,) = findings("devices")
    assert fault.found == "JAX fails: false"


def test_of_a_long_output_the_end_is_kept() -> None:
    ended = child.run(["sh", "-c", "yes | head -c 100000; echo last"], 20)
    assert (ended.code, ended.reason) == (0, "last")
    assert len(ended.output) == 20_000
