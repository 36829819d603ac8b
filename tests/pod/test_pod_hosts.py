"""The pod of hosts: its requirements, and the cleanup after a killed session."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import hosts as pod_of_hosts
from support.hosts import STALE, PodOfHosts, why_not
from support.waiting import until

HERE = Path(__file__).parent


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in why_not()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pod_of_hosts.shutil, "which", lambda tool: None if "sshd" in tool else tool)
    assert why_not().startswith("the pod of hosts needs /usr/sbin/sshd: apt-get install openssh-server")


def test_cleanup_after_a_killed_session(tmp_path: Path) -> None:
    """kill -9 of the owner ends its hosts. The next session removes its folder."""
    if why_not():
        pytest.skip(why_not())
    program = (
        "import sys, time; from support.hosts import PodOfHosts\n"
        "with PodOfHosts(2) as pod: print(pod.folder, *pod.first_processes(), flush=True); time.sleep(100)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=HERE.parent)
    assert owner.stdout is not None
    name, *processes = owner.stdout.readline().split()
    assert len(processes) == 3, "two hosts and the driver"
    folder = Path(name)
    assert folder.name.startswith(STALE)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    with PodOfHosts(2) as pod:
        assert not folder.exists()
        assert pod.inside(1, "hostname").stdout == "pod-w1\n"
    assert not pod.folder.exists()
