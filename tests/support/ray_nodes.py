"""A program that runs a Ray cluster on loopback: a head, and a node for each host with its tpu_worker resource.

Each node has its own address. None has 127.0.0.1, which Ray replaces by the machine's external address.

    python ray_nodes.py COUNT FOLDER

It prints its address. Then it executes the commands in standard input and answers each with "ok": `kill I` (SIGKILL to
raylet I), `add I`, `add I FOLDER` (Python on this node looks for modules in FOLDER first), `kill head` (SIGKILL to all
processes of the head), `add head` (a new head at the same address, and new nodes). At the end of the input it ends the
processes that it has started, and no others.
"""

import contextlib
import os
import sys
from typing import Any

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": sys.argv[2]}

from ray._private import services  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from waiting import until  # noqa: E402

OBJECT_STORE_BYTES = 80_000_000
START_S = 300
HEALTH = {
    "health_check_initial_delay_ms": 2000, "health_check_period_ms": 1000, "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 4,
}  # fmt: skip


def get_node_of_a_busy_machine(*arguments: str) -> Any:
    """Ray's own function, which asks for a node for 30 s at most, for two minutes."""

    def ask() -> Any:
        with contextlib.suppress(RuntimeError):
            return get_node(*arguments)

    return until(ask)


get_node, services.get_node = services.get_node, get_node_of_a_busy_machine


def main() -> None:
    os.makedirs(os.path.join(sys.argv[2], "ray"), exist_ok=True)
    head = {
        "num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False,
        "include_log_monitor": False, "_system_config": HEALTH, "node_ip_address": "127.0.0.2",
    }  # fmt: skip
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {}

    def add(i: int, *folder: str) -> None:
        environment = {"env_vars": {"PYTHONPATH": folder[0]}} if folder else {}
        nodes[i] = cluster.add_node(
            num_cpus=1,
            resources={f"tpu_worker_{i}": 1},
            object_store_memory=OBJECT_STORE_BYTES,
            # it waits for 30 s, which are too few on a busy machine
            wait=False,
            include_log_monitor=False,
            node_ip_address=f"127.0.0.{10 + i}",
            **environment,
        )
        cluster._wait_for_node(nodes[i], timeout=START_S)

    for i in range(int(sys.argv[1])):
        add(i)
    _say(cluster.address)
    port = int(cluster.address.rpartition(":")[2])
    for line in sys.stdin:
        verb, which, *folder = line.split()
        if line == "kill head\n":
            cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        elif line == "add head\n":
            for i in list(nodes):
                nodes.pop(i).kill_all_processes(check_alive=False, allow_graceful=False)
            cluster.head_node = None
            cluster.worker_nodes.clear()
            cluster.add_node(**head, gcs_server_port=port)
            for i in range(int(sys.argv[1])):
                add(i)
        elif verb == "kill":
            cluster.remove_node(nodes.pop(int(which)), allow_graceful=False)
        else:
            add(int(which), *folder)
        _say("ok")
    cluster.shutdown()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
