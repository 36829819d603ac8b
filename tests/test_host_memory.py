"""The memory that is left: files as Linux writes them, of machines, containers and jobs with limits."""

import sys
from pathlib import Path

import pytest

from mesh_transformer import host_memory

MIB = 1 << 20
MEMINFO = """MemTotal:       24684084 kB
MemFree:        15721604 kB
MemAvailable:   20480000 kB
Buffers:           56348 kB
Cached:          4398108 kB
SwapCached:            0 kB
"""
MACHINE = 20480000 << 10
VERSION_2 = (
    "24 22 0:22 {root} /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
)
VERSION_1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:17 master:9 - cgroup cgroup rw,memory\n"
OTHERS = """31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the files of a machine, and the limits of its control groups: their folders below /sys/fs/cgroup, each
    with the values of its files."""

    def machine(groups: str, mounts: str, **folders: dict[str, object]) -> None:
        for name, text in {"meminfo": MEMINFO, "self/cgroup": groups, "self/mountinfo": OTHERS + mounts}.items():
            path = tmp_path / "proc" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for folder, files in folders.items():
            path = tmp_path / "sys/fs/cgroup" / folder
            path.mkdir(parents=True, exist_ok=True)
            for name, value in files.items():
                (path / f"memory.{name}").write_text(f"{value}\n")

    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    return machine


def left() -> tuple[int, str]:
    found = host_memory.available()
    assert found is not None
    return found.available, found.limit


def test_without_a_limit_it_is_what_the_machine_has(write) -> None:
    write("0::/user.slice\n", VERSION_2.format(root="/"), **{"user.slice": {"max": "max", "current": 5 * MIB}})
    assert left() == (MACHINE, "this machine")
    # without control groups
    write("", "")
    assert left() == (MACHINE, "this machine")


def test_a_container_with_a_namespace_of_its_own(write) -> None:
    stat = f"anon 1000\nfile {90 * MIB}\ninactive_file {50 * MIB}\nactive_file {20 * MIB}\nslab_reclaimable {2 * MIB}\n"
    write(
        "0::/\n",
        VERSION_2.format(root="/"),
        **{".": {"max": 400 * MIB, "current": 300 * MIB, "stat": stat}},
    )
    # files that were read make room
    assert left() == (172 * MIB, "the control group /sys/fs/cgroup")


def test_the_smallest_room_of_nested_groups_counts(write) -> None:
    nested = {
        "system.slice": {"max": 1000 * MIB, "current": 990 * MIB},
        "system.slice/my\\x2djob.service": {"max": "max", "high": 700 * MIB, "current": 100 * MIB},
    }
    write("0::/system.slice/my\\x2djob.service\n", VERSION_2.format(root="/"), **nested)
    assert left() == (10 * MIB, "the control group /sys/fs/cgroup/system.slice")
    nested["system.slice"]["current"] = 100 * MIB
    write("0::/system.slice/my\\x2djob.service\n", VERSION_2.format(root="/"), **nested)
    # memory.high
    assert left()[0] == 600 * MIB
    nested["system.slice/my\\x2djob.service"]["current"] = 800 * MIB
    write("0::/system.slice/my\\x2djob.service\n", VERSION_2.format(root="/"), **nested)
    assert left()[0] == 0


def test_version_1_beside_an_unused_version_2(write) -> None:
    groups = "9:name=systemd:/\n4:memory:/jobs/a:b\n1:cpu,cpuacct:/\n0::/\n"
    unlimited = {"limit_in_bytes": 9223372036854771712, "usage_in_bytes": 800 * MIB}
    stat = f"active_file 5\ntotal_inactive_file {30 * MIB}\ntotal_active_file {10 * MIB}\n"
    limited = {"limit_in_bytes": 900 * MIB, "usage_in_bytes": 300 * MIB, "stat": stat}
    mounts = VERSION_1.format(root="/") + VERSION_2.format(root="/").replace("cgroup rw", "cgroup/unified rw", 1)
    write(groups, mounts, memory=unlimited, **{"memory/jobs/a:b": limited})
    assert left() == (640 * MIB, "the control group /sys/fs/cgroup/memory/jobs/a:b")


@pytest.mark.parametrize("path", ["/docker/3f2a", "/../../elsewhere"])
def test_a_container_of_version_1_that_sees_only_its_own_group(write, path: str) -> None:
    limited = {"limit_in_bytes": 256 * MIB, "usage_in_bytes": 56 * MIB}
    write(f"4:memory:{path}\n", VERSION_1.format(root="/docker/3f2a"), memory=limited)
    assert left() == (200 * MIB, "the control group /sys/fs/cgroup/memory")


def test_processes_in_equal_groups_of_one_machine_share_memory(write, tmp_path: Path) -> None:
    def pool(group: str, boot: str) -> str:
        write(f"0::{group}\n", VERSION_2.format(root="/"))
        path = tmp_path / "proc/sys/kernel/random/boot_id"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{boot}\n")
        found = host_memory.available()
        assert found is not None
        return found.pool

    assert pool("/a", "cf79eba7") == pool("/a", "cf79eba7")
    assert len({pool("/a", "cf79eba7"), pool("/b", "cf79eba7"), pool("/a", "0308626c")}) == 3


def test_a_system_without_these_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert host_memory.available() is None


def test_psutil_answers_where_there_are_no_such_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    available, limit = left()
    assert available == pytest.approx(psutil.virtual_memory().available, rel=0.5)
    assert limit == "this machine"


def test_this_machine() -> None:
    found = host_memory.available()
    assert found is None or 0 < found.available < 1 << 50
