"""The Python and the packages that the commands need. This module imports only the standard library, and runs on older
versions of Python."""

from __future__ import annotations

import _thread
import functools
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from mesh_transformer.errors import UserError

# README.md, CONTRIBUTING.md, pyproject.toml and scripts/venv.sh say the same
OLDEST, NEWEST = (3, 11), (3, 14)
PACKAGE = os.path.dirname(os.path.abspath(__file__))
CHECKOUT = os.path.dirname(PACKAGE)
# configs, data, scripts and requirements.txt: in a wheel, a folder of the package has them (pyproject.toml)
SHIPPED = next(filter(os.path.isdir, [os.path.join(PACKAGE, "shipped")]), CHECKOUT)
PROGRAM = "mesh-transformer"
# the scripts of a checkout, by the command that does the same
SCRIPTS = {
    "train": "device_train.py",
    "drive": "train.py",
    "sample": "device_sample.py",
    "serve": "device_serve.py",
    "evaluate": "eval_harness.py",
    "prepare": "prepare_dataset.py",
    "records": "create_finetune_tfrecords.py",
    "tokenizer": "train_tokenizer.py",
    "preflight": "preflight.py",
    "reshard": "resharding_example.py",
    "slim": "slim_model.py",
    "to-hf": "to_hf_weights.py",
    "from-hf": "from_hf_weights.py",
    "tpu": "tpu_utils.py",
}


def command(name: str) -> str:
    """The name of a command in messages: `mesh-transformer NAME` if this process was started so, or there is no
    checkout; else its script."""
    started = os.path.basename(sys.argv[0] if sys.argv else "")
    if name not in SCRIPTS or started.startswith(PROGRAM) or SHIPPED != CHECKOUT:
        return f"{PROGRAM} {name}"
    return SCRIPTS[name]


def command_line(name: str) -> str:
    """The beginning of a line for the shell that gives the command."""
    called = command(name)
    return called if called.startswith(PROGRAM) else f"python {called}"


def variables(texts: Sequence[str]) -> dict[str, str]:
    """Environment variables for other processes: each text is NAME=VALUE, or NAME of a variable of this process.

    Raises:
        UserError: a name is none, or is not set here. The message has no value, which may be a secret.
    """
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            shown = name if equals else text
            raise UserError(f"--env {shown}: give NAME=VALUE, or NAME for its value in this environment")
        if not equals and name not in os.environ:
            raise UserError(f"--env {name}: {name} is not set in this environment: set it, or give NAME=VALUE")
        values[name] = value if equals else os.environ[name]
    return values


def check_python() -> None:
    """Check the version of Python and its options.

    Raises:
        UserError: the version is not supported, or Python removes assertions.
    """
    if message := without_assertions():
        raise UserError(message)
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        current = ".".join(map(str, sys.version_info[:3]))
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise UserError(
            f"this is Python {current} ({sys.executable}), but {oldest} to {newest} is needed: "
            f"{way_in(wrong_python=True)}"
        )


def without_assertions() -> str:
    """The fault of a Python that removes `assert` statements; empty: it has them. Haiku 0.0.16 ends its scopes in
    them."""
    if not sys.flags.optimize:
        return ""
    return "Python removes the assert statements that Haiku needs: start it without -O and without PYTHONOPTIMIZE"


@contextmanager
def requirements() -> Iterator[None]:
    """Explain a package that an import inside the context does not find.

    Raises:
        UserError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (message := not_installed(error)) is None:
            raise
        raise UserError(message) from error


def not_installed(error: ModuleNotFoundError) -> str | None:
    """Advice for a package that is not installed. None if the module is part of this package or of Python, which is a
    bug."""
    name = (error.name or "").partition(".")[0]
    if not name or name == __package__ or name in sys.stdlib_module_names:
        return None
    return f"the package {name} is not installed for {sys.executable}: {way_in()}"


@contextmanager
def explained_imports(name: str) -> Iterator[None]:
    """As `requirements`, for the imports of a file that is a command and a module: the command prints the error and
    exits with code 2, and Ctrl-C ends it with one line.

    Args:
        name: `__name__` of the file.
    """
    if name != "__main__":
        yield
        return
    try:
        with interruptible():
            check_python()
            with requirements():
                yield
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the program with one line, from here on and not only inside the context: see `interrupt`."""
    handle_interrupts()
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(128 + signal.SIGINT)


def handle_interrupts() -> None:
    """Let Ctrl-C end the program wherever it is: see `interrupt`. One that comes during a callback of the garbage
    collector, where Python ignores exceptions, is raised once more."""
    if signal.getsignal(signal.SIGINT) is interrupt:
        return
    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = functools.partial(_repeat_interrupt, sys.unraisablehook)


def interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of Ctrl-C: raises KeyboardInterrupt, but ends the process at once during an import.

    A C extension that is interrupted in its own imports prints the exception and fails with another one.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(sys.stderr.fileno(), b"interrupted\n")
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


def _repeat_interrupt(otherwise: Callable[[sys.UnraisableHookArgs], object], ignored: sys.UnraisableHookArgs) -> None:
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        # after this function, in which Python ignores it too
        threading.Timer(0.05, _interrupt_main_thread).start()
    else:
        otherwise(ignored)


def _interrupt_main_thread() -> None:
    # only a real signal ends a system call; Windows has none
    if hasattr(signal, "pthread_kill") and (main := threading.main_thread().ident) is not None:
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()


def way_in(*, wrong_python: bool = False) -> str:
    """Advice for messages: how to make the packages, or a supported Python, available to the commands."""
    venv = os.path.join(CHECKOUT, ".venv")
    activate = os.path.join(venv, *(("Scripts", "activate") if os.name == "nt" else ("bin", "activate")))
    if os.path.exists(activate) and os.path.realpath(sys.prefix) != os.path.realpath(venv):
        shown = os.path.relpath(activate) if os.getcwd() == CHECKOUT else activate
        return f"run {shown if os.name == 'nt' else 'source ' + shown}"
    if SHIPPED != CHECKOUT:
        again = f"run pip install -r {os.path.join(SHIPPED, 'requirements.txt')}"
        return f"install one, and {PROGRAM} into an environment of it" if wrong_python else again
    if wrong_python:
        return "install one, and run bash scripts/quickstart.sh"
    return "run pip install -r requirements.txt && pip install -e . --no-deps, or bash scripts/quickstart.sh"
