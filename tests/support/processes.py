"""The server in a separate process, by default with the fake engine."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import loopback
from support.commands import REPO, start, write_run
from support.waiting import until

PROGRAM = "tests/support/fake_serve.py"
PATHS = {"PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "tests")])}


@contextmanager
def process(
    folder: Path, *arguments: str, program: str = PROGRAM, **options: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its URL, after its port is open. The options are those of `start`."""
    if not (folder / "config.json").exists():
        write_run(folder)
    child = start(program, "--config", "config.json", "--port", "0", *arguments, cwd=folder, **PATHS, **options)
    try:
        assert child.stderr is not None
        output = ""
        while (match := re.search(r"listening on (http://\S+) \(it answers after", output)) is None:
            line = child.stderr.readline()
            assert line, output
            output += line
        yield child, match[1]
    finally:
        child.kill()
        child.communicate()


def wait_for_health(url: str, status: int = 200) -> None:
    until(lambda: loopback.get(f"{url}/health").status_code == status)
