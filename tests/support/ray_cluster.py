"""Starts a Ray cluster on loopback for a test: ray_nodes.py in a process."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from support.commands import TESTS


class RayNodes(NamedTuple):
    """A Ray cluster with two hosts. `temporary` is the folder with the locks of their workers."""

    address: str
    temporary: Path
    process: subprocess.Popen[str]

    def ask(self, line: str) -> None:
        """Send a command to the cluster's process, and wait until it is done."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"


@contextlib.contextmanager
def ray_cluster(environment: Mapping[str, str]) -> Iterator[RayNodes]:
    """A cluster whose processes have these variables."""
    # a short name: Ray's socket names have a length limit
    folder = Path(tempfile.mkdtemp(prefix="rt"))
    log = open(folder / "nodes.log", "w")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "support/ray_nodes.py"), "2", str(folder)],
        env={**os.environ, **environment, "TMPDIR": str(folder)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
    )
    address = process.stdout.readline().strip()
    assert address, (folder / "nodes.log").read_text()[-4000:]
    yield RayNodes(address, folder, process)
    process.stdin.close()
    try:
        process.wait(60)
    finally:
        process.kill()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)
