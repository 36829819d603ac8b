"""Workers, a node and the driver die or stop while they make a data set: its bytes stay the same. On one machine no
port is open."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import psutil
import pytest
from support.commands import finish, run, start
from support.data_sets import hashes, write_corpus
from support.ray_cluster import RayNodes, ray_cluster
from support.terminals import terminal
from support.waiting import until

from mesh_transformer.dataset.pool import Pool
from mesh_transformer.dataset.process_pool import ProcessPool
from mesh_transformer.dataset.ray_pool import RayPool
from mesh_transformer.dataset.tasks import OnPool
from mesh_transformer.dataset.worker import Task
from mesh_transformer.errors import RunError, UserError

# the machine of a test may have other work
WAIT_S = 600
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def nodes():
    pytest.importorskip("ray")
    with ray_cluster(ENVIRONMENT) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def command(texts, tmp_path_factory) -> list[str]:
    """Some forty parts of half a second each: GPT-2's tokenizer."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    corpus = write_corpus(folder, seed=2)
    lines = [json.dumps({"text": f"{number} {text}" * 40}) for number in range(5) for text in corpus.documents[:300]]
    (folder / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return [
        "--input", str(folder), "--tokenizer", str(texts / "gpt2_tokenizer"), "--seq", "128", "--dedup",
        "--part-mb", "0.5", "--shard-tokens", "400000",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(command, tmp_path_factory) -> dict[str, str]:
    """The hashes of the data set of one process."""
    folder = tmp_path_factory.mktemp("alone")
    run("prepare_dataset.py", *command, "--output", "set", "--workers", "1", cwd=folder, **ENVIRONMENT)
    return hashes(folder / "set")


class Place(Protocol):
    """Where the tasks of a job run."""

    options: tuple[str, ...]

    def workers(self, driver: subprocess.Popen[str]) -> list[int]:
        """The processes that run a task now."""

    def lose_node(self) -> None:
        """End a node and its workers."""

    def add_node(self) -> None:
        """Start it again."""


class OfThisMachine:
    """Two processes of the driver's machine."""

    options = ("--workers", "2")

    def workers(self, driver: subprocess.Popen[str]) -> list[int]:
        children = psutil.Process(driver.pid).children()
        return [child.pid for child in children if any("spawn_main" in word for word in child.cmdline())]

    def lose_node(self) -> None:
        """There is one."""

    add_node = lose_node


class OfCluster:
    """Two nodes of a Ray cluster."""

    def __init__(self, nodes: RayNodes):
        self._nodes = nodes
        self.options = ("--ray-address", nodes.address)

    def workers(self, driver: subprocess.Popen[str]) -> list[int]:
        # Ray writes the name of the task into the command line
        nodes = psutil.Process(self._nodes.process.pid).children(recursive=True)
        return [process.pid for process in nodes if "ray::call_in" in " ".join(cmdline_of(process))]

    def lose_node(self) -> None:
        self._nodes.ask("kill 1")

    def add_node(self) -> None:
        self._nodes.ask("add 1")


def cmdline_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(params=["processes", "ray"])
def place(request) -> Place:
    return OfThisMachine() if request.param == "processes" else OfCluster(request.getfixturevalue("nodes"))


def fragments(folder: Path) -> dict[Path, int]:
    """The finished fragments, and when each was written, ns."""
    return {path: path.stat().st_mtime_ns for path in (folder / "work").glob("fragment-*")}


def wait_for_fragments(driver: subprocess.Popen[str], folder: Path, count: int) -> None:
    until(lambda: len(fragments(folder)) >= count, driver, shown=lambda: driver.stderr.read()[-4000:])


def test_kills_and_stops_change_no_byte(place, command, alone, tmp_path):
    """kill -9 of a worker, of the driver and of a node, then SIGSTOP of a worker, which has no end."""
    folder, stopped = tmp_path / "set", None

    def begin() -> subprocess.Popen[str]:
        return start("prepare_dataset.py", *command, "--output", "set", *place.options, cwd=tmp_path, **ENVIRONMENT)

    def a_worker() -> int:
        return until(lambda: place.workers(driver), driver)[0]

    driver = begin()
    try:
        wait_for_fragments(driver, folder, 2)
        os.kill(a_worker(), signal.SIGKILL)
        wait_for_fragments(driver, folder, 6)
        driver.kill()
        driver.communicate()
        before = fragments(folder)
        driver = begin()
        wait_for_fragments(driver, folder, len(before) + 4)
        assert fragments(folder).items() >= before.items()
        place.lose_node()
        wait_for_fragments(driver, folder, len(before) + 8)
        stopped = a_worker()
        os.kill(stopped, signal.SIGSTOP)
        place.add_node()
        _, said = finish(driver, timeout_s=WAIT_S)
    finally:
        driver.kill()
        driver.communicate()
        if stopped is not None and psutil.pid_exists(stopped):
            os.kill(stopped, signal.SIGKILL)
    assert "started a second time" in said
    assert "are finished already" in said
    assert hashes(folder) == alone


def test_a_job_goes_on_after_its_terminal_has_closed(command, alone, tmp_path):
    with terminal() as window:
        options = ("--output", "set", "--workers", "2")
        driver = window.start("prepare_dataset.py", *command, *options, cwd=tmp_path, **ENVIRONMENT)
        try:
            until(lambda: len(fragments(tmp_path / "set")) >= 2, driver)
            shown = window.close()
            assert driver.wait(WAIT_S) == 128 + signal.SIGHUP, shown
        finally:
            driver.kill()
            driver.wait()
    _, errors = run("prepare_dataset.py", *command, *options, cwd=tmp_path, **ENVIRONMENT)
    assert "are finished already" in errors
    assert hashes(tmp_path / "set") == alone


def sockets(process: psutil.Process) -> list[str]:
    """The TCP and UDP sockets of a process."""
    numbers = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path("/proc", str(process.pid), "net", name).read_text().splitlines()[1:]
        numbers |= {f"socket:[{line.split()[9]}]" for line in lines}
    names = [os.readlink(path) for path in Path("/proc", str(process.pid), "fd").iterdir()]
    return [name for name in names if name in numbers]


def test_on_one_machine_nothing_listens(command, tmp_path):
    """No process has a socket for a network, none has loaded Ray, and all end where the driver is killed."""
    driver = start("prepare_dataset.py", *command, "--output", "set", "--workers", "2", cwd=tmp_path, **ENVIRONMENT)
    try:
        wait_for_fragments(driver, tmp_path / "set", 4)
        driver.send_signal(signal.SIGSTOP)
        processes = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
        assert len(OfThisMachine().workers(driver)) == 2
        assert [sockets(process) for process in processes] == [[]] * len(processes)
        assert not any("ray/_raylet" in Path("/proc", str(process.pid), "maps").read_text() for process in processes)
    finally:
        driver.kill()
        driver.communicate()
    gone, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    assert not alive, gone


@pytest.fixture
def cluster(nodes, monkeypatch) -> Iterator[RayPool]:
    """Runs tasks on the cluster from this process."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with RayPool(nodes.address) as cluster:
        yield cluster


@pytest.fixture(params=["processes", "ray"])
def pool(request) -> Iterator[Pool]:
    """Runs tasks from this process."""
    if request.param == "ray":
        yield request.getfixturevalue("cluster")
        return
    with ProcessPool(2) as processes:
        yield processes


def test_a_task_that_ends_its_worker_each_time_ends_the_job(pool):
    """As a file does that pyarrow cannot bear."""
    tasks = [Task(len, ("text",), "a.txt"), Task(os.abort, (), "b.parquet, row groups 0 to 3")]
    with pytest.raises(RunError, match=r"^b.parquet, row groups 0 to 3: 5 workers have died of this task, .* crashed"):
        list(OnPool(pool).run(tasks))


DIES_FOUR_TIMES = """
import os, signal
with open(marks, "a") as file:
    file.write("x")
if os.path.getsize(marks) < 5:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_task_that_ends_four_workers_goes_on(pool, tmp_path):
    marks = [tmp_path / str(number) for number in range(2)]
    tasks = [Task(exec, (DIES_FOUR_TIMES, {"marks": str(path)}), path.name) for path in marks]
    assert sorted(OnPool(pool).run(tasks)) == [(0, None), (1, None)]
    assert [path.stat().st_size for path in marks] == [5, 5]


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("from mesh_transformer.errors import UserError; raise UserError('a.txt: bad')", UserError, r"^a\.txt: bad$"),
        ("class Odd(Exception): pass\nraise Odd('b')", RuntimeError, r"(?s)^in a process .*Traceback .*Odd: b"),
    ],
)
def test_an_error_of_a_task_in_a_process(code, kind, message):
    with ProcessPool(2) as processes, pytest.raises(kind, match=message):
        list(OnPool(processes).run([Task(exec, (code, {}), "a.txt")]))


WITHOUT = """
import importlib.machinery, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "mesh_transformer":
            found = importlib.machinery.PathFinder.find_spec(name, [{folder!r}])
            if found is None:
                raise ModuleNotFoundError("No module named 'mesh_transformer'", name=name)
            return found
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("copied", "message"),
    [
        (False, r"^the Ray node .* has not this program \(No module named 'mesh_transformer'\): install"),
        (True, r"^the Ray node .* has another version of this program \(.*/copy/mesh_transformer\): install"),
    ],
)
def test_a_node_with_another_program(nodes, cluster, repo, tmp_path, copied, message):
    """The tasks of the first nodes run, and the third node gets one because the others are busy."""
    if copied:
        shutil.copytree(repo / "mesh_transformer", tmp_path / "copy/mesh_transformer")
        with (tmp_path / "copy/mesh_transformer/dataset/fragment.py").open("a") as file:
            file.write("# changed\n")
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(folder=str(tmp_path / "copy")))
    nodes.ask(f"add 2 {tmp_path}")
    try:
        with pytest.raises(UserError, match=message):
            list(OnPool(cluster).run([Task(time.sleep, (2.0,), "")] * 20))
    finally:
        nodes.ask("kill 2")
