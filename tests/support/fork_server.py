"""Starts commands of the project as forks of one process that has imported their modules: this takes half of the CPU
time of a new interpreter.

A worker of pytest has one such process, from the first command that it starts to its own end. The two speak over a
socket:

    worker: a command line, its folder, umask and environment, as JSON, with the files of its standard streams
    server: the id of the new process, then a word when this process is a child of the worker

The command is a child of the worker, as any other: its exit code, its signals and its CPU time are those of `Popen`.
For this the server forks twice, and the worker adopts the process whose parent has ended (PR_SET_CHILD_SUBREAPER).
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
# Before a command line. libtpu lets its process ignore SIGHUP and SIGPROF, and a child would too.
DEFAULT_SIGNALS = ("env", "--default-signal")
# what the commands import when they have read their arguments. Not modules that read XDG_CACHE_HOME, such as
# huggingface_hub: each command has its own
MODULES = (
    "mesh_transformer.runtime.training.trainer",
    "mesh_transformer.runtime.sampling.sampler",
    "mesh_transformer.runtime.serving.start",
    "mesh_transformer.runtime.convert",
    "mesh_transformer.cluster.driver.commands",
    "mesh_transformer.dataset.job",
)
# variables that commands have of their own. The server has none of them: modules such as fsspec read all that it has
_OF_A_COMMAND = {"PYTHONPATH", "XDG_CACHE_HOME", "XLA_FLAGS", "PJRT_NPROC", "PYTEST_CURRENT_TEST"}
# variables that the interpreter and libraries in C read. Those that MODULES read from os.environ are noted
_READ_IN_C = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "TF_CPP_", "GRPC_", "OPENBLAS_", "OMP_")
_MESSAGE_BYTES = 200_000
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """The server, as the worker sees it."""

    def __init__(self, environment: dict[str, str]):
        own = {name: environment[name] for name in environment.keys() - _OF_A_COMMAND}
        # keeps the borders of messages
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [*DEFAULT_SIGNALS, sys.executable, __file__, str(other.fileno())], env=own, cwd=REPO,
                pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        atexit.register(self.close)
        self._lock = threading.Lock()
        self.environment = own
        read, self._written = json.loads(self._answer())
        self._read = set(read)

    def close(self) -> None:
        """End the server. It ends too when the worker is killed: the kernel closes the worker's end of the socket."""
        self._socket.close()
        self._process.wait()

    def can_start(self, program: str, environment: dict[str, str]) -> bool:
        """Whether a process of its own would import the modules that the server has, with the same settings."""
        paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        own = all(Path(path).is_relative_to(REPO) for path in (program, *paths))
        names = environment.keys() | self.environment.keys()
        names = self._read | {name for name in names if name.startswith(_READ_IN_C)} - _OF_A_COMMAND
        # this process has the variables that JAX sets if it has imported JAX
        given, later = self.environment, {**self.environment, **self._written}
        return own and all(environment.get(name) in (given.get(name), later.get(name)) for name in names)

    def start(self, command: list[str], cwd: Path, environment: dict[str, str], files: list[int]) -> int:
        """The id of a new process, a child of this one, that runs a program with arguments. `files`: its stdin, stdout
        and stderr."""
        os.umask(umask := os.umask(0))
        message = json.dumps([command, str(cwd), umask, environment]).encode()
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._socket, [message], files)
                pid = int(self._answer())
                self._answer()
            finally:
                _adopt_orphans(False)
        return pid

    def _answer(self) -> bytes:
        answer = self._socket.recv(_MESSAGE_BYTES)
        if not answer:
            raise RuntimeError(f"the fork server has ended with code {self._process.wait()}")
        return answer


class Forked(subprocess.Popen[str]):
    """A process that the server forks. The arguments are those of `Popen`; the first is a command line of Python."""

    def __init__(self, server: ForkServer, args: list[str], **options: Any):
        self._server = server
        super().__init__(args, **options)

    def _execute_child(  # the order of subprocess.py in Python 3.11 to 3.14
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest
    ) -> None:  # fmt: skip
        streams = rest[:6]
        self.pid = self._server.start(args[1:], cwd, env, [streams[0], streams[3], streams[5]])
        self._child_created = True
        self._close_pipe_fds(*streams)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _adopt_orphans(adopt: bool) -> None:
    """Let processes below this one whose parent ends become its children, or those of process 1."""
    if _libc().prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(adopt), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _import() -> tuple[set[str], dict[str, str]]:
    """Import MODULES. Returns the names of the variables that they read, and the variables that they set."""
    before, read = dict(os.environ), set()
    kind = type(os.environ)
    get = kind.__getitem__

    def note(self: Any, name: Any) -> str:
        read.add(os.fsdecode(name))
        return get(self, name)

    kind.__getitem__ = note
    for name in MODULES:
        importlib.import_module(name)
    kind.__getitem__ = get
    return read, {name: value for name, value in os.environ.items() if before.get(name) != value}


def _serve(connection: socket.socket) -> str:
    """Fork a process for each message. Returns in this process, with the path of its program."""
    sys.path[0] = str(REPO)
    read, written = _import()
    # as before an interpreter has its own handler: Ctrl-C ends the server without a message
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # the pages of these objects stay shared
    gc.collect()
    gc.freeze()
    connection.send(json.dumps([sorted(read), written]).encode())
    while True:
        message, files, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        if between := os.fork():
            # A lock that another thread holds now would stay locked in the command. OpenBLAS ends its threads before a
            # fork; a JAX backend, gRPC and Ray do not.
            if len(os.listdir("/proc/self/task")) > 1:
                raise RuntimeError("a module of tests/support/fork_server.py starts threads when it is imported")
            os.waitpid(between, 0)
            connection.send(b"forked")
            for file in files:
                os.close(file)
        else:
            parent = os.getpid()
            if command := os.fork():
                connection.send(b"%d" % command)
                os._exit(0)
            # the worker adopts this process when its parent has ended
            while os.getppid() == parent:
                time.sleep(0.001)
            connection.close()
            return _become(files, written, *json.loads(message))


def _become(
    files: list[int], written: dict[str, str], arguments: list[str], cwd: str, umask: int, environment: dict
) -> str:
    """Make this process as an interpreter that has just started. Returns the path of its program."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.umask(umask)
    os.environ.clear()
    os.environ.update(environment | written)
    sys.argv = arguments
    paths = environment.get("PYTHONPATH")
    sys.path[:1] = [os.path.dirname(arguments[0]), *(paths.split(os.pathsep) if paths else ())]
    # an editable installation adds its folder, if PYTHONPATH has not
    sys.path[:] = dict.fromkeys(sys.path)
    if measuring := sys.modules.get("coverage"):
        measuring.Coverage.current().switch_context(environment.get("PYTEST_CURRENT_TEST", ""))
    # random does this itself
    sys.modules["numpy"].random.seed()
    return arguments[0]


if __name__ == "__main__":
    program = _serve(socket.socket(fileno=int(sys.argv[1])))
    # at the end of this file, so that the interpreter itself prints what the program raises, and ends
    runpy.run_path(program, run_name="__main__")
