"""scripts/pod_ray.sh with a replacement for Ray: the workers of a run when their node restarts."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import TESTS
from support.waiting import LONG_S, until

from mesh_transformer.cloud import head, launch
from mesh_transformer.cloud.launch import WORKER_LINE

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pod_ray.sh"
BUSY = "The current node timed out during startup"
# a node with an agent, which starts a worker in another session, as the real agents do
NODE = """
import subprocess, sys, time
print("Ray runtime started", flush=True)
subprocess.Popen([sys.executable, "worker.py", "mesh_transformer.cluster.host.worker"], start_new_session=True)
time.sleep(600)
"""
WORKER = """
import signal, sys, time
def tell(word):
    with open("mark", "a") as file:
        file.write(word)
def save(*_):
    time.sleep({saving_s})
    tell("saved ")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
tell("began ")
time.sleep(600)
"""


# runs a command when its standard input is closed: by the test that started it, or by the kernel if that was killed
AT_END = 'cat >/dev/null; exec "$@"'


def at_end(command, **environment):
    """The process that will run a command when its standard input is closed, also if this process is killed."""
    return subprocess.Popen(
        ["bash", "-c", AT_END, "at_end", *command], stdin=subprocess.PIPE, env={**os.environ, **environment},
        start_new_session=True,
    )  # fmt: skip


@pytest.fixture
def pod_ray(tmp_path):
    def call(*arguments, **environment):
        done = subprocess.run(
            ["bash", str(SCRIPT), arguments[0], str(tmp_path / "state"), *arguments[1:]],
            # `ps` must not truncate lines
            env={**os.environ, "COLUMNS": "40", **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    stop = at_end(["bash", str(SCRIPT), "stop", str(tmp_path / "state")], MESH_TRANSFORMER_SAVE_S="0")
    yield call
    stop.stdin.close()
    assert stop.wait(LONG_S) == 0


def test_what_a_killed_test_has_started_ends(tmp_path):
    """The supervisor leads a session of its own, and would start its node again for ever."""
    program = (
        "import sys, time; from cloud import test_ray_script as tests; "
        "stop = tests.at_end(['touch', sys.argv[1]]); print('started', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "ended")], cwd=TESTS, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "started\n"
    child.kill()
    child.communicate()
    until((tmp_path / "ended").exists)


def start(pod_ray, folder, *, saving_s=1):
    """Start a node with a worker that needs `saving_s` to save. Returns the command, and the file with the worker's
    actions."""
    (folder / "node.py").write_text(NODE)
    (folder / "worker.py").write_text(WORKER.format(saving_s=saving_s))
    command = ["env", "-C", str(folder), sys.executable, "node.py"]
    assert pod_ray("start", "one", *command) == "ray started\n"
    mark = folder / "mark"
    until(lambda: mark.exists() and mark.read_text())
    return command, mark


def test_a_busy_host_gets_a_second_start(pod_ray, tmp_path):
    """Ray ends a node that needs more than 30 s."""
    slow = f"test -e slow || {{ touch slow; echo 'Exception: {BUSY}. This could happen'; exit 1; }}"
    command = ["env", "-C", str(tmp_path), "bash", "-c", f"{slow}; echo Ray runtime started; sleep 600"]
    assert pod_ray("start", "one", *command) == "ray started\n"


def test_its_callers_wait_for_longer_than_it_takes():
    limits = {name: int(value) for name, value in re.findall(r"^(\w+_S)=\D*(\d+)", SCRIPT.read_text(), re.MULTILINE)}
    assert limits.keys() == {"READY_S", "STOP_S", "SAVE_S"}
    assert sum(limits.values()) < launch.RAY_TIMEOUT_S
    assert limits["READY_S"] + limits["STOP_S"] < head.START_S


def test_another_reason_is_told_at_once(pod_ray, tmp_path):
    command = ["env", "-C", str(tmp_path), "bash", "-c", "touch -- begun-$RANDOM; echo no memory; exit 3"]
    with pytest.raises(subprocess.CalledProcessError) as failure:
        pod_ray("start", "one", *command)
    assert "no memory" in failure.value.stderr
    assert "ray ended with code 3" in failure.value.stderr
    assert len(list(tmp_path.glob("begun-*"))) == 1


def test_the_reason_is_rays():
    node = importlib.util.find_spec("ray._private.node")
    assert node is not None
    assert node.origin is not None
    assert BUSY in Path(node.origin).read_text()


def test_the_same_command_leaves_the_worker_alone(pod_ray, tmp_path):
    command, mark = start(pod_ray, tmp_path)
    assert pod_ray("start", "one", *command) == "ray is up\n"
    assert mark.read_text() == "began "


def test_another_command_lets_the_worker_save_first(pod_ray, tmp_path):
    """As after a change of the code."""
    command, mark = start(pod_ray, tmp_path)
    output = pod_ray("start", "two", *command)
    # the launch shows such lines
    assert output.startswith(WORKER_LINE)
    assert "has saved and exited" in output
    assert mark.read_text().startswith("began saved ")


def test_a_stop_lets_the_worker_save_first(pod_ray, tmp_path):
    _, mark = start(pod_ray, tmp_path)
    assert "has saved and exited" in pod_ray("stop")
    assert mark.read_text() == "began saved "


def test_the_wait_for_a_worker_has_a_limit(pod_ray, tmp_path):
    _, mark = start(pod_ray, tmp_path, saving_s=8)
    output = pod_ray("stop", MESH_TRANSFORMER_SAVE_S="1")
    assert output.startswith(WORKER_LINE)
    assert "has not exited after 1 s" in output
    assert mark.read_text() == "began "


def test_another_process_with_the_id_of_a_dead_supervisor_survives(pod_ray, tmp_path):
    """It leads a session, as a supervisor does."""
    stranger = subprocess.Popen(["sleep", "100"], start_new_session=True)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    first = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "ray.pid").write_text(f"{stranger.pid} {boot}-{first}\n")
    pod_ray("stop")
    time.sleep(0.1)
    ended = stranger.poll()
    stranger.kill()
    stranger.wait()
    assert ended is None
    assert not (tmp_path / "state" / "ray.pid").exists()
