"""A pod of hosts on one machine: each has its own network, mounts, processes, name, home and /tmp, and an SSH server.

A host is a process tree in its own namespaces, with sshd as process 1. It sees the files of this machine, with two
exceptions: /root and /tmp are its own (the Python in use stays visible there, read-only), and the package in this
checkout is hidden, so a host runs only code that was pushed to it. All hosts are on one bridge without another
connection.

The driver has its own process, mount and IPC namespaces too, so that commands on "all Ray processes" stay inside them.
Its network is that of the thread which makes the pod: a namespace with the bridge and its own loopback, which that
thread leaves with the pod. So the machine's network stays as it is: Chromium ends all its requests when an interface
comes or goes. Hosts die with the process that created them. This module needs root, and Linux with util-linux,
iproute2 and openssh-server.

    with PodOfHosts(4, tmp_path) as pod:
        subprocess.run([*pod.driver_prefix(), sys.executable, "train.py", ...])
        pod.link(2, up=False)
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from support.waiting import LONG_S

REPO = Path(__file__).resolve().parents[2]
NETWORK = "10.77.0"
DRIVER = f"{NETWORK}.1"
BRIDGE = "mtjpod0"
LOCK = Path(tempfile.gettempdir()) / "mesh-transformer-pod.lock"
STALE = "mesh-transformer-pod-"
START_S = LONG_S
# <linux/sched.h>
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
IN_NAMESPACES = [
    "setpriv", "--pdeathsig", "KILL", "unshare", "-m", "-p", "-i", "-f", "--mount-proc", "--kill-child",
]  # fmt: skip

HOST = r"""
set -euo pipefail
i=$1 state=$2 count=$3 network=$4 hidden=$5; shift 5   # the rest: folders to keep although /root and /tmp are replaced
mount --make-rprivate /                           # else mounts are seen outside
own=$state/host$i; mkdir -p "$own/root/.ssh" "$own/tmp"
for kept in "$@"; do
    case $kept in /root/*) new=$own/root/${kept#/root/} ;; /tmp/*) new=$own/tmp/${kept#/tmp/} ;; *) continue ;; esac
    mkdir -p "$new"; mount --bind "$kept" "$new"; mount -o remount,bind,ro "$new"
done
chmod 700 "$own/root" "$own/root/.ssh"; chmod 1777 "$own/tmp"
install -m 600 "$state/key.pub" "$own/root/.ssh/authorized_keys"
install -m 600 "$state/host_key$i" "$own/root/.host_key"
mount --rbind "$own/root" /root; mount --rbind "$own/tmp" /tmp
if [[ -d $hidden ]]; then mount -t tmpfs -o size=4k,mode=755 tmpfs "$hidden"; fi
mount -t tmpfs -o size=2g,mode=1777 tmpfs /dev/shm
mount -t tmpfs -o size=16m,mode=755 tmpfs /run; mkdir -p /run/sshd
hostname "pod-w$i"
{ echo "127.0.0.1 localhost"; echo "$network.1 driver"
  for ((j = 0; j < count; j++)); do echo "$network.$((11 + j)) pod-w$j"; done; } >/run/hosts
mount --bind /run/hosts /etc/hosts                # a host's own name must be its address on the bridge
cat >/run/sshd.conf <<CONF
ListenAddress $network.$((11 + i)):22
HostKey /root/.host_key
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AuthorizedKeysFile /root/.ssh/authorized_keys
MaxStartups 100
MaxSessions 100
UseDNS no
Subsystem sftp internal-sftp
CONF
read -r _                                         # until there is a network
exec /usr/sbin/sshd -D -e -f /run/sshd.conf       # as process 1 it takes in the orphans
"""
DRIVER_HOST = r"""
set -euo pipefail
mount --make-rprivate /
mount -t tmpfs -o size=2g,mode=1777 tmpfs /dev/shm
own=/tmp/mesh-transformer-0; mkdir -p -m 700 $own "$1/own"; mount --bind "$1/own" $own; touch "$1/driver_ready"
while true; do sleep 1 & wait; done               # process 1: takes in the orphans
"""

PROBE = """
mount --make-rprivate /; mount -t tmpfs tmpfs /run; ip link add probe0 type bridge
ip link add probe1 type veth peer name probe2
"""


def why_not() -> str:
    """Why this machine cannot run a pod; empty if it can."""
    if os.geteuid() != 0:
        return "the pod of hosts needs root: run the tests as root, or in a privileged container"
    tools = ["unshare", "nsenter", "setpriv", "ip", "/usr/sbin/sshd", "ssh-keygen"]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"the pod of hosts needs {', '.join(missing)}: apt-get install openssh-server openssh-client iproute2"
    command = ["unshare", "-n", "-m", "-p", "-u", "-i", "-f", "--mount-proc", "bash", "-ec", PROBE]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


class PodOfHosts:
    """A context manager for the hosts. A machine runs one pod at a time; others wait.

    Args:
        count: number of hosts.
        keep: further folders below /root or /tmp that hosts must see.
    """

    def __init__(self, count: int = 4, keep: tuple[str, ...] = ()):
        self.count = count
        self.keep = [sys.base_prefix, sys.prefix, *keep]
        self.keep = sorted({os.path.realpath(path) for path in self.keep} | {sys.prefix})
        self.addresses = tuple(f"{NETWORK}.{11 + i}" for i in range(count))
        self._unshared: dict[int, subprocess.Popen[bytes]] = {}
        # process 1 of each host, by its process ID on this machine
        self._first: dict[int, int] = {}
        self._lock: IO[str] | None = None
        # the caller's network namespace, as a file descriptor
        self._network: int | None = None

    def __enter__(self) -> PodOfHosts:
        self._lock = LOCK.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._remove_stale()
            self.folder = Path(tempfile.mkdtemp(prefix=STALE))
            self._make_keys()
            self._network = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            _call("unshare", CLONE_NEWNET)
            _sh("ip", "link", "set", "lo", "up")
            _sh("ip", "link", "add", BRIDGE, "type", "bridge")
            _sh("ip", "addr", "add", f"{DRIVER}/24", "dev", BRIDGE)
            _sh("ip", "link", "set", BRIDGE, "up")
            for i in range(self.count):
                self.start(i)
            self._start_driver()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for i in list(self._first):
                self.stop(i)
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            if self._network is not None:
                # the namespace goes with its last process, and the bridge with it
                _call("setns", self._network, CLONE_NEWNET)
                os.close(self._network)
                self._network = None
            # a worker that waits for it would wait for ever
            if self._lock is not None:
                self._lock.close()

    @property
    def key_file(self) -> Path:
        """The private key for the login as root on every host."""
        return self.folder / "key"

    @property
    def known_hosts(self) -> Path:
        """The hosts' keys, by address."""
        return self.folder / "known_hosts"

    @property
    def driver_home(self) -> Path:
        """The home folder of the driver."""
        return self.folder / "driver"

    def host_keys(self) -> dict[str, str]:
        """The hosts' public keys by address, for `TpuApi`."""
        lines = self.known_hosts.read_text().splitlines()
        return {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in lines}

    def start(self, i: int) -> None:
        """Start host `i`. Returns when its SSH server listens. Only the main thread may call it."""
        with (self.folder / f"host{i}.log").open("ab") as log:
            command = [
                *IN_NAMESPACES,
                "-n",
                "-u",
                "bash",
                "-c",
                HOST,
                "host",
                str(i),
                str(self.folder),
                str(self.count),
            ]
            process = subprocess.Popen(
                [*command, NETWORK, str(REPO / "mesh_transformer"), *self.keep],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._unshared[i] = process
        first = self._first[i] = _child(process)
        inside = ["nsenter", "-t", str(first), "-n", "ip"]
        # a constant MAC address: others cache the one of an IP address for half a minute
        peer = ["peer", "name", "eth0", "address", f"02:00:0a:4d:00:{11 + i:02x}", "netns", str(first)]
        _sh("ip", "link", "add", f"{BRIDGE}v{i}", "type", "veth", *peer)
        _sh("ip", "link", "set", f"{BRIDGE}v{i}", "master", BRIDGE, "up")
        _sh(*inside, "addr", "add", f"{self.addresses[i]}/24", "dev", "eth0")
        _sh(*inside, "link", "set", "eth0", "up")
        _sh(*inside, "link", "set", "lo", "up")
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
        self._wait_for_sshd(i)

    def stop(self, i: int) -> None:
        """End host `i` at once with all its processes, like a power failure. Its files stay."""
        os.kill(self._first.pop(i), signal.SIGKILL)
        self._unshared.pop(i).wait()
        subprocess.run(["ip", "link", "del", f"{BRIDGE}v{i}"], capture_output=True, check=False)

    def link(self, i: int, *, up: bool) -> None:
        """Disconnect or connect the network of host `i`."""
        _sh("ip", "link", "set", f"{BRIDGE}v{i}", "up" if up else "down")

    def inside(self, i: int, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in host `i` (-1: in the driver's namespaces), without SSH."""
        prefix = ["nsenter", "-t", str(self._first[i]), "-m", "-p", "-n", "-u", "-i", "--"]
        return subprocess.run([*prefix, *command], capture_output=True, text=True, check=False)

    def first_processes(self) -> list[int]:
        """Process 1 of each host and of the driver, by process ID on this machine."""
        return list(self._first.values())

    def driver_prefix(self, **environment: str) -> list[str]:
        """Words before a command that run it as the driver. To kill it, use `driver_signal`: its process is only a
        wrapper."""
        variables = [f"{name}={value}" for name, value in {"HOME": str(self.driver_home), **environment}.items()]
        return ["nsenter", "-t", str(self._first[-1]), "-m", "-p", "-i", "--", "env", *variables]

    @staticmethod
    def driver_signal(process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to a command that was started with `driver_prefix`."""
        os.kill(_child(process), number)

    def _start_driver(self) -> None:
        self.driver_home.mkdir()
        with (self.folder / "driver.log").open("ab") as log:
            command = [*IN_NAMESPACES, "bash", "-c", DRIVER_HOST, "driver", str(self.folder)]
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._unshared[-1] = process
        self._first[-1] = _child(process)
        deadline = time.monotonic() + START_S
        while not (self.folder / "driver_ready").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "driver.log").read_text())
            time.sleep(0.01)

    def _make_keys(self) -> None:
        lines = []
        for name in ("key", *(f"host_key{i}" for i in range(self.count))):
            _sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.folder / name))
        for i, address in enumerate(self.addresses):
            kind, value = (self.folder / f"host_key{i}.pub").read_text().split()[:2]
            lines.append(f"{address} {kind} {value}\n")
        self.known_hosts.write_text("".join(lines))

    def _wait_for_sshd(self, i: int) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((self.addresses[i], 22), 0.5).close()
            except OSError:
                if self._unshared[i].poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.folder / f"host{i}.log").read_text()) from None
                time.sleep(0.02)
            else:
                return

    def _remove_stale(self) -> None:
        """Remove what a killed session has left. This session has the lock, so no other one uses it."""
        for path in Path(tempfile.gettempdir()).glob(f"{STALE}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)


def _child(process: subprocess.Popen) -> int:
    """The only child of a process that forks one: process 1 of its namespace, or the command behind nsenter."""
    deadline = time.monotonic() + START_S
    pid = process.pid
    while True:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except FileNotFoundError as error:
            raise RuntimeError(f"process {pid} ended") from error
        if children:
            return int(children[0])
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {pid} has no child")
        time.sleep(0.005)


def _call(name: str, *values: int) -> None:
    """Call a function of libc that Python 3.11 does not have in `os`. It acts on this thread."""
    if getattr(LIBC, name)(*values):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
