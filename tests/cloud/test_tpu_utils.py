"""tpu_utils.py as a user runs it: real processes, Google's client, a server on loopback."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from google.rpc import code_pb2
from support import commands
from support.local_hosts import local_pod
from support.tpu_api import TpuApi
from support.waiting import until

from mesh_transformer.commands import tpu

ZONE = ("--zone", "europe-west4-a")


@pytest.fixture
def api() -> TpuApi:
    with TpuApi() as server:
        yield server


def tool(api: TpuApi, folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    """Run the command with the test's folder as its home folder."""
    return commands.run("tpu_utils.py", *arguments, *ZONE, cwd=folder, code=code, HOME=str(folder), **api.environment())


def test_life_of_a_tpu(api: TpuApi, tmp_path: Path) -> None:
    output, progress = tool(api, tmp_path, "create", "a", "--type", "v3-32", "--spot", "--queued", "--label", "team=x")
    assert "a: ready (queue ACTIVE, READY)" in output
    assert "4 hosts, 16 chips (4x4), 32 cores, 32 JAX devices of 16 GiB" in output
    assert "w3 (127.0.1.4), external 203.0.113.4" in output
    assert "label team=x" in output
    assert "creating TPU a (v3-32) in europe-west4-a" in progress
    assert tool(api, tmp_path, "create", "a", "--type", "v3-32", "--spot", "--queued")[0] == output.replace(
        "\n\n", "\n"
    )
    assert api.calls.count("CreateQueuedResource") == 1
    listed = tool(api, tmp_path, "list")[0].split()
    assert listed == ["a", "v3-32", "spot", "4", "hosts", "queue", "ACTIVE,", "READY"]
    assert tool(api, tmp_path, "describe", "a")[0] == output
    assert tool(api, tmp_path, "delete", "a")[0] == "a: deleted\n"
    assert tool(api, tmp_path, "delete", "a")[0] == "a: not found in europe-west4-a of test\n"
    assert tool(api, tmp_path, "list")[0] == "no TPUs in europe-west4-a of test\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["ssh", "b", "--env", "NOT_SET"], 2, "error: --env NOT_SET: NOT_SET is not set in this environment"),
        (["run", "b", "--env", "NOT_SET"], 2, "error: --env NOT_SET: NOT_SET is not set in this environment"),
        (["describe", "b"], 2, "error: TPU b: not found: there is none in europe-west4-a of test"),
        (
            ["create", "b", "--type", "v3-9"],
            2,
            "error: unknown TPU type 'v3-9': v3 slices by cores are v3-8, v3-32",
        ),
        (["create", "B", "--type", "v3-8"], 2, "error: 'B' is no valid name of a TPU"),
        (["create", "b", "--type", "v3-8", "--ssh-key", "nowhere"], 2, "ssh-keygen -t ed25519 -f nowhere"),
        (["create", "b", "--type", "v3-8", "--spot", "--reserved"], 2, "not allowed with argument"),
        (["run", "b"], 2, "error: run needs a command: python tpu_utils.py run NAME --zone Z -- COMMAND"),
        (["ssh", "b"], 2, "error: TPU b: not found"),
        (["create", "b", "--type", "v3-8", "--label", "x"], 2, "write NAME=VALUE"),
        (
            [],
            2,
            "error: the following arguments are required: {create,list,describe,ssh,run,delete}; see tpu_utils.py "
            "--help",
        ),
    ],
)
def test_mistakes(api: TpuApi, tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    _, errors = commands.run(
        "tpu_utils.py", *arguments, *(ZONE if arguments else ()), cwd=tmp_path, code=code, HOME=str(tmp_path),
        **api.environment(),
    )  # fmt: skip
    assert said in errors
    assert "Traceback" not in errors


def test_refused_and_failed(api: TpuApi, tmp_path: Path) -> None:
    api.fail("CreateNode", code_pb2.PERMISSION_DENIED, "no tpu.nodes.create", reason="IAM_PERMISSION_DENIED")
    _, errors = tool(api, tmp_path, "create", "a", "--type", "v3-8", code=2)
    assert "permission: no tpu.nodes.create [IAM_PERMISSION_DENIED]" in errors
    api.capacity["v3-8"] = 0
    _, errors = tool(api, tmp_path, "create", "a", "--type", "v3-8", code=1)
    assert "no capacity: There is no more capacity in the zone" in errors
    _, errors = tool(api, tmp_path, "create", "a", "--type", "v3-8", "--again", "--timeout", "2", code=1)
    assert "timed out" in errors
    assert "Traceback" not in errors


def test_interrupted_while_waiting(api: TpuApi, tmp_path: Path) -> None:
    """Ctrl-C prints that the request continues; the same command waits for it again."""
    api.capacity["v3-8"] = 0
    arguments = ("create", "a", "--type", "v3-8", "--queued", *ZONE)
    process = commands.start("tpu_utils.py", *arguments, cwd=tmp_path, HOME=str(tmp_path), **api.environment())
    until(lambda: "WAITING" in str([entry.state.state.name for entry in api.queued.values()]), process)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    output, errors = commands.finish(process, 130)
    assert "interrupted: the request continues. `python tpu_utils.py delete a" in output
    assert "Traceback" not in errors
    api.capacity["v3-8"] = 1
    assert (
        "a: ready" in commands.run("tpu_utils.py", *arguments, cwd=tmp_path, HOME=str(tmp_path), **api.environment())[0]
    )
    assert api.calls.count("CreateQueuedResource") == 1


def test_variables_of_run_and_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both commands give a host the values, without a value on their command lines."""
    homes = [tmp_path / "w0", tmp_path / "w1"]
    pod = local_pod(homes, monkeypatch)
    monkeypatch.setattr(tpu, "Tpus", lambda *_: None)
    monkeypatch.setattr(tpu, "_pod", lambda *_: pod)
    monkeypatch.setenv("TOKEN", "it's secret")
    given = ["b", *ZONE, "--env", "TOKEN", "--env", "OTHER=a b"]
    tpu.main(["run", *given, "--", 'echo "$TOKEN|$OTHER" > result'])
    assert [(home / "result").read_text() for home in homes] == ["it's secret|a b\n"] * 2
    monkeypatch.setattr(os, "execvp", lambda _, words: called.extend(words))
    called: list[str] = []
    tpu.main(["ssh", *given, "--worker", "1"])
    assert "secret" not in " ".join(called)
    shell = {"PATH": os.environ["PATH"]}
    line = called[-1].removesuffix('exec "$SHELL" -l') + "printenv TOKEN"
    done = subprocess.run(["bash", "-c", line], cwd=homes[1], env=shell, capture_output=True, text=True, check=True)
    assert done.stdout == "it's secret\n"
    assert not [path for home in homes for path in home.glob(".mesh-transformer-*")]
