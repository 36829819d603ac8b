"""The parameters of a checkpoint of any form, on a session's devices."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax.numpy as jnp

from mesh_transformer.checkpoint.agree import agreed
from mesh_transformer.checkpoint.manifest import DamagedCheckpoint
from mesh_transformer.checkpoint.open import open_source
from mesh_transformer.checkpoint.place import place
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.errors import UserError
from mesh_transformer.models.model import Params
from mesh_transformer.runtime.session import Session


class Weights(NamedTuple):
    """The parameters of a checkpoint, float32, on their devices, and its step."""

    params: Params
    step: int


def read_params(session: Session, path: str) -> Weights:
    """The parameters alone, without the moments, of the checkpoint that `path` names.

    Raises:
        UserError: there is no checkpoint, or it is of another model or damaged.
    """
    source = open_agreed(session, path)
    abstract = session.placement.abstract(jnp.dtype("float32"))
    return Weights(place_named(source, {"params": abstract})["params"], source.counts.step)


def split_step(path: str) -> tuple[str, int | None]:
    """The run's folder and the step of `run/step_N`; for any other path, itself and None."""
    path = path.rstrip("/")
    match = re.fullmatch(r"(.*/)?step_(\d+)", path)
    return ((match[1] or "./").rstrip("/"), int(match[2])) if match else (path, None)


def open_agreed(session: Session, path: str) -> TensorSource:
    """The checkpoint, if every process can open it; errors as in `read_params`."""
    source = agreed(lambda: open_source(path, session.config.model))
    agreed(lambda: source.counts)
    return source


def place_named(source: TensorSource, abstract: Any) -> Any:
    """As `place`, of a checkpoint that the user named.

    Raises:
        UserError: it is of another model or damaged.
    """
    try:
        return place(source, abstract)
    except DamagedCheckpoint as damage:
        raise UserError(f"{source.where} is damaged: {damage}; name another step or checkpoint") from damage
