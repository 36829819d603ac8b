"""Workers, a node and the driver of a Ray cluster die or stop while they make a data set: its bytes stay the same."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.commands import finish, run, start
from support.data_sets import hashes, write_corpus
from support.ray_cluster import RayNodes, ray_cluster
from support.waiting import until

from mesh_transformer.dataset.tasks import OnRay
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


def tasks_below(pid: int) -> list[int]:
    """The processes below `pid` that run a task of Ray now. Ray writes the name of the task into the command line."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(stat[1]), (entry / "cmdline").read_bytes()
        except OSError:
            continue
    found, level = [], {pid}
    while level:
        level = {child for child, (parent, _) in parents.items() if parent in level}
        found += [child for child in level if b"ray::call_in" in parents[child][1]]
    return found


def a_task(nodes: RayNodes) -> int:
    """A process that runs a task."""
    return until(lambda: tasks_below(nodes.process.pid))[0]


def fragments(folder: Path) -> dict[Path, int]:
    """The finished fragments, and when each was written, ns."""
    return {path: path.stat().st_mtime_ns for path in (folder / "work").glob("fragment-*")}


def wait_for_fragments(driver: subprocess.Popen[str], folder: Path, count: int) -> None:
    until(lambda: len(fragments(folder)) >= count, driver, shown=lambda: driver.stderr.read()[-4000:])


def test_kills_and_stops_change_no_byte(nodes, command, alone, tmp_path):
    """kill -9 of a worker, of the driver and of a node, then SIGSTOP of a worker: Ray does not see this one."""
    folder, stopped = tmp_path / "set", None

    def begin() -> subprocess.Popen[str]:
        options = ["--output", "set", "--ray-address", nodes.address]
        return start("prepare_dataset.py", *command, *options, cwd=tmp_path, **ENVIRONMENT)

    driver = begin()
    try:
        wait_for_fragments(driver, folder, 2)
        os.kill(a_task(nodes), signal.SIGKILL)
        wait_for_fragments(driver, folder, 6)
        driver.kill()
        driver.communicate()
        before = fragments(folder)
        driver = begin()
        wait_for_fragments(driver, folder, len(before) + 4)
        assert fragments(folder).items() >= before.items()
        nodes.ask("kill 1")
        wait_for_fragments(driver, folder, len(before) + 8)
        stopped = a_task(nodes)
        os.kill(stopped, signal.SIGSTOP)
        nodes.ask("add 1")
        _, said = finish(driver, timeout_s=WAIT_S)
    finally:
        driver.kill()
        driver.communicate()
        if stopped is not None:
            os.kill(stopped, signal.SIGKILL)
    assert "started a second time" in said
    assert "are finished already" in said
    assert hashes(folder) == alone


@pytest.fixture
def cluster(nodes, monkeypatch):
    """Runs tasks on the cluster from this process."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with OnRay(nodes.address) as cluster:
        yield cluster


def test_a_task_that_ends_its_worker_each_time_ends_the_job(cluster):
    """As a file does that pyarrow cannot bear."""
    with pytest.raises(RunError, match=r"^b.parquet, row groups 0 to 3: 5 workers have died of this task, .* crashed"):
        list(cluster.run([Task(len, ("text",), "a.txt"), Task(os.abort, (), "b.parquet, row groups 0 to 3")]))


def test_a_task_that_ends_four_workers_goes_on(cluster, tmp_path):
    # Ray sends a function within a function itself
    def task(number):
        marks = tmp_path / str(number)
        with marks.open("a") as file:
            file.write("x")
        if marks.stat().st_size < 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    found = list(cluster.run([Task(task, (number,), str(number)) for number in range(2)]))
    assert sorted(found) == [(0, 0), (1, 1)]


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
            list(cluster.run([Task(time.sleep, (2.0,), "")] * 20))
    finally:
        nodes.ask("kill 2")
