"""Only one process trains in a folder at a time."""

import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from support.commands import REPO

from mesh_transformer.errors import UserError
from mesh_transformer.runtime.training import run_folder
from mesh_transformer.runtime.training.run_folder import RunLock

HOLD = """
import sys, time
from mesh_transformer.runtime.training.run_folder import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has locked the folder."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout.readline() == "held\n"
        yield child
        child.kill()


def test_the_second_run_is_refused_with_the_name_of_the_first(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(run_folder, "WAIT_S", 0.2)
    with pytest.raises(UserError) as refused, RunLock(str(tmp_path)):
        pass
    message = str(refused.value)
    assert f"{tmp_path} is in use: process {holder.pid} on host {socket.gethostname()} has used" in message
    assert "--set checkpoint.model_dir=" in message


def test_the_kernel_frees_it_when_its_holder_is_killed(tmp_path, holder):
    """Also for a process that starts to wait just before that."""
    holder.send_signal(signal.SIGKILL)
    with RunLock(str(tmp_path)) as lock:
        assert lock.still_in_place()
    with RunLock(str(tmp_path)) as lock:
        shutil.rmtree(tmp_path)
        assert not lock.still_in_place()
        tmp_path.mkdir()
        (tmp_path / run_folder.LOCK).write_text("of another run")
        assert not lock.still_in_place()
