"""The lock of a worker, in a folder that another user may have prepared: no link is followed, and no other process is
killed."""

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import LONG_S

from mesh_transformer.cloud.pod import kill_command
from mesh_transformer.cluster.host import processes
from mesh_transformer.cluster.host.agent import Agent
from mesh_transformer.errors import UserError

HOLDER = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
os.pwrite(file, str(os.getpid()).encode(), 0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the locks, in a temporary folder of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"mesh-transformer-{os.getuid()}"


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has printed a line and runs until its standard input ends."""
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        started.stdout.readline()
        yield started
    finally:
        started.kill()
        started.communicate()


def stranger() -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return process(sys.executable, "-c", "print(1, flush=True); input()")


def holder(folder: Path, *of_a_worker: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """A process that holds the lock of worker 0 of run "a". `of_a_worker` extends its command line."""
    return process(sys.executable, "-c", HOLDER, str(folder / "a-0.lock"), *of_a_worker)


def is_alive(started: subprocess.Popen[str]) -> bool:
    time.sleep(0.1)
    return started.poll() is None


def a_link(folder: Path) -> str:
    prey = folder.parent / "prey"
    prey.mkdir(mode=0o700)
    folder.symlink_to(prey)
    return "is a link"


def open_to_others(folder: Path) -> str:
    folder.mkdir()
    folder.chmod(0o777)
    return r"is open to other users \(mode 777\)"


def of_another_user(folder: Path) -> str:
    if os.getuid() != 0:
        pytest.skip("only root can make a folder of another user")
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    return "belongs to user 12345"


@pytest.mark.parametrize("prepare", [a_link, open_to_others, of_another_user])
def test_an_unsafe_folder_is_rejected(folder: Path, prepare) -> None:
    """Workers, agents and drivers reject it with one line, and change nothing in it."""
    message = prepare(folder)
    before = sorted(folder.parent.rglob("*"))
    for use in (lambda: processes.lock_worker("a", 0), lambda: Agent(0, "a"), lambda: processes.lock_driver("a")):
        with pytest.raises(UserError, match=f"mesh-transformer-.*{message}.*TMPDIR") as error:
            use()
        assert "\n" not in str(error.value)
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "use"), [("a-0.lock", lambda: processes.lock_worker("a", 0)), ("a-0.log", lambda: Agent(0, "a"))]
)
def test_a_link_in_the_folder_is_not_followed(folder: Path, name: str, use) -> None:
    """Its target is neither truncated nor extended."""
    prey = folder.parent / "prey"
    prey.write_text("precious")
    folder.mkdir(mode=0o700)
    (folder / name).symlink_to(prey)
    with pytest.raises(UserError, match=f"{name} .*is a link"):
        use()
    assert prey.read_text() == "precious"


def test_only_the_user_can_access_the_folder(folder: Path) -> None:
    before = os.umask(0)
    try:
        os.close(processes.lock_worker("a", 0))
        Agent(0, "a").close()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes == {folder.name: 0o700, "a-0.lock": 0o600, "a-0.log": 0o600}


def test_another_process_in_the_lock_file_is_not_killed(folder: Path) -> None:
    """Also a process that holds the lock, and a worker of another run with the same process ID."""
    folder.mkdir(mode=0o700)
    lock = folder / "a-0.lock"
    worker_of = ("-m", processes.WORKER.decode(), "5")
    with (
        stranger() as victim,
        holder(folder) as held,
        process(sys.executable, "-c", "print(1, flush=True); input()", *worker_of, "b-0") as other,
    ):
        for named in (victim, held, other):
            lock.write_text(str(named.pid))
            with pytest.raises(OSError, match=f"is held: process {named.pid} is no worker of this run"):
                processes.lock_worker("a", 0, wait_s=0)
            assert is_alive(named)
        for text in ("", "0", "1", "-1", "x", "9" * 30, str(os.getpid())):
            lock.write_text(text)
            with pytest.raises(OSError, match="is not killed"):
                processes.lock_worker("a", 0, wait_s=0)


def test_a_previous_worker_of_the_run_is_killed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with holder(folder, "-m", processes.WORKER.decode(), "5", "a-0") as left:
        began = time.monotonic()
        file = processes.lock_worker("a", 0, wait_s=0.3)
        # time for the previous worker to save
        assert time.monotonic() - began >= 0.3
        assert left.wait(LONG_S) == -9
    assert (folder / "a-0.lock").read_text() == str(os.getpid())
    with open(folder / "a-0.lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(file)


def test_a_process_with_a_reused_id_is_not_killed() -> None:
    """A driver identifies a process by ID and start time, and kills workers only; directly and over SSH."""
    with (
        stranger() as victim,
        process(sys.executable, "-c", "print(1, flush=True); input()", processes.WORKER.decode()) as worker,
    ):
        known, unknown = processes.identify(worker.pid), processes.identify(victim.pid)
        earlier = known._replace(start_ticks=known.start_ticks - 1)
        assert processes.kill([earlier, unknown]) == []
        for process_, code in ((earlier, 0), (known._replace(pid=2**22), 0)):
            done = subprocess.run(["bash", "-c", kill_command(*process_)], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (code, "")
        assert is_alive(worker)
        assert processes.kill([earlier, unknown, known]) == [known.pid]
        assert worker.wait(LONG_S) == -9
        subprocess.run(["bash", "-c", kill_command(*unknown)], check=True)
        assert victim.wait(LONG_S) == -9
