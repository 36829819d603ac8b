"""Calls a task in a worker, and explains failures."""

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mesh_transformer
from mesh_transformer.environment import requirements
from mesh_transformer.errors import RunError, UserError, is_disk_full
from mesh_transformer.ray_join import first_line

AGAIN = "give the same command again: it goes on with the parts that are finished"


class Task(NamedTuple):
    """A call of `function` with `arguments`. `about`: what it reads or writes, for messages."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    about: str


def call(task: Task) -> Any:
    """The result of a task."""
    with failures_explained():
        return task.function(*task.arguments)


@contextlib.contextmanager
def failures_explained(again: str = AGAIN) -> Iterator[None]:
    """Failures of the disk and of a bucket become errors of one line, which ends with what to do then."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        if is_disk_full(error):
            raise RunError(f"the disk is full ({first_line(error)}): free some space, and {again}") from error
        if isinstance(error, (OSError, EOFError)) or _of_bucket(error):
            raise RunError(f"{first_line(error)}: correct it, and {again}") from error
        raise


def _of_bucket(error: Exception) -> bool:
    """Whether a bucket has refused a request, or has not answered."""
    with contextlib.suppress(ImportError):
        from google.api_core.exceptions import GoogleAPICallError, RetryError
        from requests.exceptions import RequestException

        return isinstance(error, (GoogleAPICallError, RetryError, RequestException))
    return False


@functools.cache
def program_version() -> str:
    """A hash of the modules that make data sets."""
    root = Path(mesh_transformer.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for folder in ("data", "dataset") for path in (root / folder).rglob("*.py")):
        digest.update(b"%s %d\n" % (path.relative_to(root).as_posix().encode(), path.stat().st_size))
        digest.update(path.read_bytes())
    return digest.hexdigest()


def call_sent(version: str, content: bytes, loads: Callable[[bytes], Any]) -> tuple[float, Any] | str:
    """The seconds and the result of a task on a worker, or why it cannot run here. Relative paths are relative to the
    driver's folder, if the node has it.

    Args:
        version: of the driver's program.
        content: the driver's folder and the task.
        loads: Ray's function that reads them.

    Raises:
        UserError, RunError: as the task, or a package is not installed on this node.
    """
    if program_version() != version:
        return f"another version of this program ({os.path.dirname(mesh_transformer.__file__)})"
    with requirements():
        folder, task = loads(content)
        with contextlib.suppress(OSError):
            os.chdir(folder)
        began = time.monotonic()
        result = call(task)
    return time.monotonic() - began, result
