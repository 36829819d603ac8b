"""Runs the commands of a page in one shell, as a reader types them into a fresh clone.

The shell differs from a reader's in few ways, all stated here and in `doc_table.py`:

- `python` is the tests' environment, and `scripts/venv.sh` in the clone is a stand-in that links `.venv` to it, because
  an installation takes minutes and needs a package index;
- `mesh-transformer` is `python -m mesh_transformer`, so that the package of the clone runs, not an installed one;
- a server runs beside the commands after it until the page ends or starts another one. Then it gets SIGINT, as by
  Ctrl-C, and has to end with exit code 0. It has a free port instead of 5000;
- `curl` fails if the server answers with an error;
- some commands are shortened (`doc_table.SHORTER`).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.commands import free_port
from support.doc_blocks import Block
from support.doc_output import missing
from support.doc_table import shorter

PORT = "5000"
READY_SECONDS = 240
# what a training prints that finds a finished run in its folder
NOTHING = "the run is complete"
_COMMAND, _MODULE = "mesh-transformer ", "python -m mesh_transformer "
_SERVERS = ("python device_serve.py", f"{_MODULE}serve")
_FUNCTIONS = f"""
export PATH="{Path(sys.executable).parent}:$PATH"
server=
stop_server() {{
    [[ $server ]] || return 0
    kill -INT "$server"
    wait "$server" || {{ echo "the server ended with exit code $?" >>"$1"; return 1; }}
    server=
}}
wait_until_ready() {{
    for ((i = 0; i < {READY_SECONDS}; i++)); do
        grep -q "ready: " "$1" && return
        kill -0 "$server" || return 1
        sleep 1
    done
    return 1
}}
"""


def clone(root: Path, folder: Path) -> Path:
    """A copy of the files of the working tree that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in names.split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    stand_in = folder / "scripts/venv.sh"
    stand_in.write_text(f'#!/bin/sh\n# a stand-in: the tests install nothing\nln -sfn "{sys.prefix}" "$1"\n')
    return folder


def run(blocks: Sequence[Block], checkout: Path, logs: Path, timeout_s: float) -> None:
    """Run the commands and programs of a page, and compare what they print with the page.

    Raises:
        AssertionError: a command fails or prints something else, with its output.
    """
    logs.mkdir()
    port = str(free_port())
    script = [_FUNCTIONS]
    ran = [block for block in blocks if block.kind in ("command", "python", "file")]
    for number, block in enumerate(ran):
        script.append(_step(block, logs / f"{number:02}", port))
    script.append(f'stop_server "{logs}/server" && echo 0 >"{logs}/end"')
    (logs / "curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    (logs / ".curlrc").write_text((logs / "curlrc").read_text())
    shell = subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        cwd=checkout,
        env=_environment(logs),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        shell.wait(timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    for number, block in enumerate(ran):
        _check(block, logs / f"{number:02}", port)
    assert (logs / "end").exists(), (logs / "server").read_text()


def _step(block: Block, log: Path, port: str) -> str:
    if block.kind == "file":
        log.with_suffix(".file").write_text(f"{block.text}\n")
        return f'cp "{log}.file" "{block.name}" && echo 0 >"{log}.code"'
    text = _with_port(f"{block.text} {shorter(block)}".rstrip(), port).replace(_COMMAND, _MODULE)
    if block.kind == "python":
        log.with_suffix(".py").write_text(text)
        text = f'python - <"{log}.py"'
    if text.startswith(_SERVERS):
        return (
            f'stop_server "{log}" || exit\n{text} --port {port} >"{log}" 2>&1 &\nserver=$!\n'
            f'wait_until_ready "{log}" || exit\necho 0 >"{log}.code"'
        )
    return f'{{ {text}\n}} >"{log}" 2>&1\necho $? >"{log}.code"\n[[ $(<"{log}.code") == 0 ]] || exit'


def _with_port(text: str, port: str) -> str:
    return text.replace(f"127.0.0.1:{PORT}", f"127.0.0.1:{port}")


def _check(block: Block, log: Path, port: str) -> None:
    output = log.read_text(errors="replace") if log.exists() else ""
    code = log.with_suffix(".code")
    assert code.exists(), f"{block}: did not end or was not run\n{output[-4000:]}"
    assert code.read_text() == "0\n", f"{block}: exit code {code.read_text().strip()}\n{output[-4000:]}"
    nothing = NOTHING in output and not any(NOTHING in line for line in block.printed)
    assert not nothing, f"{block}: it finds a finished run and does nothing\n{output[-4000:]}"
    absent = missing([_with_port(line, port) for line in block.printed], output)
    assert absent is None, f"{block}: the page has the line\n{absent}\nbut the command printed\n{output[-8000:]}"


def _environment(logs: Path) -> dict[str, str]:
    """The reader's environment: without what tests/conftest.py sets for the tests, but with their compile cache."""
    tests_own = ("XLA_FLAGS", "JAX_NUMPY", "JAX_PERSISTENT", "PYTEST", "TESTS_SEED", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(tests_own)}
    home = {"HOME": str(logs), "XDG_CACHE_HOME": str(logs / "cache")}
    return kept | home | {"HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
