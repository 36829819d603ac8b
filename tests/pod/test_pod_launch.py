"""From an empty cloud to Ray on four hosts: the TPU API, its host keys, SSH, provisioning; and tpu_utils.py."""

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import commands
from support.hosts import DRIVER, PodOfHosts
from support.tpu_api import TpuApi

REPO = Path(__file__).parents[2]
ZONE = ("--zone", "europe-west4-a")
LAUNCH = """
    import json, logging, sys
    from mesh_transformer.cloud import head
    from mesh_transformer.cloud.api import Timing
    from mesh_transformer.cloud.environment import ExistingEnvironment
    from mesh_transformer.cloud.launch import LaunchOptions, launch
    from mesh_transformer.cloud.hosts import Access
    from mesh_transformer.cloud.request import TpuRequest
    from mesh_transformer.cloud.tpus import Tpus
    from mesh_transformer.slices import parse
    logging.basicConfig(level="INFO")
    key, folder, address = sys.argv[1:]
    tpus = Tpus("europe-west4-a", timing=Timing(pause_s=0.05, longest_pause_s=0.5))
    small = ("--object-store-memory=100000000",)
    plan = LaunchOptions(
        ExistingEnvironment(sys.prefix), Access("", user="root", key_file=key, connect_timeout_s=60),
        ("--num-cpus=1", *small),
        tpu_timeout_s=60, ssh_timeout_s=120,
    )
    request = TpuRequest("pod", parse("v3-32"), tier="spot", queued=True)
    launched = launch(tpus, request, head.start(folder, address, arguments=small), plan)
    print(json.dumps({"seconds": launched.seconds, "pushed": launched.provisioned.pushed}))
"""


@pytest.fixture(scope="module")
def api(hosts: PodOfHosts) -> Iterator[TpuApi]:
    """A cloud in which every TPU has our four hosts."""
    with TpuApi(hosts.addresses, hosts.host_keys()) as server:
        yield server


def launch(hosts: PodOfHosts, api: TpuApi) -> dict:
    """Launch from a new driver process."""
    variables = {**api.environment(), "PYTHONPATH": str(REPO)}
    program = [
        sys.executable,
        "-c",
        textwrap.dedent(LAUNCH),
        str(hosts.key_file),
        str(hosts.driver_home / "head"),
        DRIVER,
    ]
    done = subprocess.run(
        [*hosts.driver_prefix(**variables), *program], capture_output=True, text=True, timeout=180, check=False, cwd="/"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_launch_twice_and_after_a_preemption(hosts: PodOfHosts, api: TpuApi) -> None:
    cold = launch(hosts, api)
    assert cold["pushed"]["code"] == [0, 1, 2, 3]
    assert list(cold["seconds"]) == ["tpu", "ssh", "pack", "check", "push code", "ray"]
    node = next(iter(api.nodes.values()))
    assert node.metadata["ssh-keys"].startswith("root:ssh-ed25519 ")

    warm = launch(hosts, api)
    assert warm["pushed"] == {"code": []}
    assert api.calls.count("CreateQueuedResource") == 1

    api.preempt("pod")
    again = launch(hosts, api)
    assert api.calls.count("CreateQueuedResource") == 2
    assert again["pushed"] == {"code": []}, "the hosts of the test are the same: nothing is missing"


def test_commands_on_the_hosts(hosts: PodOfHosts, api: TpuApi, tmp_path: Path) -> None:
    def tool(*arguments: str, code: int = 0) -> tuple[str, str]:
        return commands.run(
            "tpu_utils.py", *arguments, cwd=tmp_path, code=code, HOME=str(tmp_path), **api.environment()
        )

    login = ("--user", "root", "--ssh-key", str(hosts.key_file))
    tool("create", "tool", "--type", "v3-32", *ZONE, *login)
    _, errors = tool("run", "tool", *ZONE, *login, "--", "hostname; exit 0")
    assert [f"w{i}| pod-w{i}" in errors for i in range(4)] == [True] * 4
    _, errors = tool("run", "tool", *ZONE, *login, "--worker", "1", "--", "sh", "-c", "echo $0; exit 4", code=1)
    assert "w1 (10.77.0.12): exit code 4" in errors
    assert "w2" not in errors
    process = commands.start(
        "tpu_utils.py", "ssh", "tool", *ZONE, *login, "--worker", "2", cwd=tmp_path, HOME=str(tmp_path),
        **api.environment(),
    )  # fmt: skip
    # standard input is empty, so the shell ends at once
    assert "pod-w2" not in commands.finish(process)[0]
    _, errors = tool("ssh", "tool", *ZONE, *login, "--worker", "9", code=2)
    assert "has workers 0 to 3" in errors

    process = commands.start(
        "tpu_utils.py", "run", "tool", *ZONE, *login, "--", "echo begun; tail -f /dev/null", cwd=tmp_path,
        HOME=str(tmp_path), **api.environment(),
    )  # fmt: skip
    assert process.stderr is not None
    while "begun" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = commands.finish(process, 130)
    assert output == "interrupted: the command may still be running on the hosts\n"
    assert "Traceback" not in errors

    keys = api.host_keys
    api.host_keys = dict.fromkeys(keys, keys["10.77.0.11"])
    try:
        _, errors = tool("run", "tool", *ZONE, *login, "--", "hostname", code=2)
    finally:
        api.host_keys = keys
    assert "3 of 4 hosts failed" in errors
    assert "its host key differs from the one in" in errors
    assert "Traceback" not in errors
