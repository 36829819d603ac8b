"""A forked command behaves as one in a new interpreter."""

import functools
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import REPO, TESTS, finish, fork_server
from support.fork_server import DEFAULT_SIGNALS, Forked
from support.waiting import LONG_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server needs Linux")

STATE = """
import atexit, gc, json, logging, os, random, signal, sys, tempfile, threading, warnings
import jax, numpy, support.xla
from mesh_transformer.runtime.training import trainer
atexit.register(print, "at exit")
umask = os.umask(0)
json.dump({
    "environment": dict(os.environ), "folder": os.getcwd(), "umask": umask, "temporary": tempfile.gettempdir(),
    "arguments": sys.argv, "main": [__name__, __file__, sys.modules["__main__"].__dict__ is globals()],
    "path": sys.path, "flags": str(sys.flags), "executable": sys.executable,
    "group": os.getpgrp(), "session": os.getsid(0), "parent": os.getppid(),
    "files": [number for number in range(200) if os.path.exists(f"/proc/self/fd/{number}")],
    "threads": threading.active_count(), "input": sys.stdin.read(),
    "streams": [[f.name, f.encoding, f.errors, f.line_buffering] for f in (sys.stdin, sys.stdout, sys.stderr)],
    "signals": {n: str(signal.getsignal(n)).split(" at ")[0] for n in sorted(signal.valid_signals())},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "jax": {name: str(value) for name, value in jax.config.values.items()},
    "garbage": [gc.isenabled(), gc.get_threshold()], "warnings": sorted(map(str, warnings.filters)),
    "logging": [logging.getLogger().level, str(logging.getLogger().handlers)],
}, sys.stdout, indent=1, sort_keys=True, default=str)
threading.Timer(0.2, print, ["\\na thread"]).start()
print(random.random(), numpy.random.rand(), file=sys.stderr)
"""


def program(folder: Path, text: str, *arguments: str, fresh: bool = False, **environment: str) -> subprocess.Popen[str]:
    """Start a program, given as text, as a fork or in a new interpreter."""
    path = folder / "program.py"
    # a program before this one may be about to read it
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    kind = subprocess.Popen if fresh else functools.partial(Forked, fork_server())
    variables = {**fork_server().environment, **environment}
    return kind(
        [*(DEFAULT_SIGNALS if fresh else ()), sys.executable, str(path), *arguments], cwd=folder, env=variables,
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_it_is_as_a_new_interpreter(tmp_path: Path) -> None:
    """Its folder, environment, streams, signals, and JAX's settings; its random numbers are others each time."""
    options = {"PYTHONPATH": os.pathsep.join(map(str, (REPO, TESTS))), "XDG_CACHE_HOME": "cache", "OWN": "\udcff é"}
    before = os.umask(0o027)
    try:
        ended = [program(tmp_path, STATE, "--an", "argument", fresh=fresh, **options) for fresh in (True, False, False)]
    finally:
        os.umask(before)
    (fresh, *_), (first, numbers), (second, others) = (finish(process) for process in ended)
    assert first == fresh
    assert second == fresh
    assert json.loads(fresh.removesuffix("\na thread\nat exit\n"))["umask"] == 0o027
    assert numbers != others


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("raise SystemExit(7)", 7),
        ("import sys; sys.exit('words')", 1),
        ("import os; os._exit(9)", 9),
        ("def f(): raise ValueError('a fault')\nf()", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_its_end(tmp_path: Path, text: str, code: int) -> None:
    errors, expected = (
        [line for line in finish(program(tmp_path, text, fresh=fresh), code)[1].splitlines() if line.strip(" ~^")]
        for fresh in (False, True)
    )
    # a traceback has the frames of runpy too
    assert [line for line in errors if "fork_server" not in line and "runpy" not in line] == expected
    assert errors[-1:] == expected[-1:]


def test_it_is_killed_and_measured(tmp_path: Path) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    process = program(tmp_path, "while True: print('more', flush=True)")
    assert process.stdout.readline() == "more\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{process.pid}/status").read_text()
    process.kill()
    process.communicate(timeout=LONG_S)
    assert process.poll() == -signal.SIGKILL
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > used


@pytest.mark.parametrize(
    ("program", "changes", "expected"),
    [
        ("device_train.py", {}, True),
        ("device_train.py", {"XDG_CACHE_HOME": "other", "JAX_PROCESS_ID": "1", "PJRT_NPROC": "3"}, True),
        ("device_train.py", {"PYTHONPATH": str(TESTS)}, True),
        ("device_train.py", {"PYTHONPATH": "/tmp"}, False),
        ("/tmp/program.py", {}, False),
        ("device_train.py", {"JAX_ENABLE_X64": "true"}, False),
        ("device_train.py", {"PYTHONWARNINGS": "error"}, False),
        ("device_train.py", {"LC_ALL": "C"}, False),
    ],
)
def test_what_is_read_at_the_start_of_an_interpreter_needs_one(
    program: str, changes: dict[str, str], expected: bool
) -> None:
    server = fork_server()
    assert server.can_start(str(REPO / program), {**server.environment, **changes}) == expected
