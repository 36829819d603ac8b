"""Reading in several processes: all succeed, or all learn that one did not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer.checkpoint.manifest import DamagedCheckpoint
from mesh_transformer.errors import CredentialsError, UserError

T = TypeVar("T")


def agreed(read: Callable[[], T]) -> T:
    """The result of `read`, if it succeeded in every process.

    Raises:
        DamagedCheckpoint: it failed in this process or in another.
    """
    reason = ""
    try:
        result = read()
    except (CredentialsError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # the machine's fault, not the checkpoint's
    except Exception as error:  # noqa: BLE001  (Orbax and TensorStore raise all sorts for a damaged file)
        reason = first_cause(error)
    failed = multihost_utils.process_allgather(np.bool_(reason))
    if np.any(failed):
        raise DamagedCheckpoint(reason or f"unreadable in processes {np.flatnonzero(failed).tolist()}")
    return result


def first_cause(error: BaseException) -> str:
    """The innermost error: all that ours says, of others the first line, without TensorStore's dump of its settings."""
    ours = (DamagedCheckpoint, UserError)
    while error.__cause__ is not None and not isinstance(error, ours):
        error = error.__cause__
    if isinstance(error, ours):
        return str(error)
    text = str(error).partition(" [tensorstore_spec")[0].partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:500]
