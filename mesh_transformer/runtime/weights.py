"""Parameters and moments of a checkpoint of any form, on a session's devices."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from mesh_transformer.checkpoint.agree import agreed
from mesh_transformer.checkpoint.manifest import DamagedCheckpoint
from mesh_transformer.checkpoint.open import open_source
from mesh_transformer.checkpoint.place import place, place_scalar
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.errors import UserError
from mesh_transformer.models.base import Params
from mesh_transformer.runtime.session import Session
from mesh_transformer.train.optim import moments, with_moments


class Weights(NamedTuple):
    """The parameters of a checkpoint, float32, on their devices; Adam's moments and counts too if asked for."""

    params: Params
    step: int
    opt_state: Any | None = None


def read_params(session: Session, path: str) -> Weights:
    """The parameters alone, without the moments, of the checkpoint that `path` names.

    Raises:
        UserError: there is no checkpoint, or it is of another model or damaged.
    """
    source = _open(session, path)
    return Weights(_params(session, source), source.counts.step)


def read_weights(session: Session, path: str) -> Weights:
    """Parameters and optimizer state of the checkpoint that `path` names; `opt_state` is None if it has no moments.

    Raises:
        UserError: as in `read_params`.
    """
    return place_weights(session, _open(session, path))


def place_weights(session: Session, source: TensorSource) -> Weights:
    """Everything that an open checkpoint holds, on the devices; errors as in `read_params`."""
    abstract = session.program.abstract_state
    if not has_moments(source):
        return Weights(_params(session, source), source.counts.step)
    placed = _placed(source, {"params": abstract.params, **moments(abstract.opt_state)})
    adam, schedule = (
        place_scalar(count or 0, abstract.step) for count in (source.counts.adam, source.counts.schedule)
    )
    opt_state = with_moments(abstract.opt_state, placed, adam, schedule)
    return Weights(placed["params"], source.counts.step, opt_state)


def has_moments(source: TensorSource) -> bool:
    """Whether a checkpoint holds Adam's moments."""
    return any(name.startswith("mu/") for name in source.tensors)


def split_step(path: str) -> tuple[str, int | None]:
    """The run's folder and the step of `run/step_N`; for any other path, itself and None."""
    path = path.rstrip("/")
    match = re.fullmatch(r"(.*/)?step_(\d+)", path)
    return ((match[1] or "./").rstrip("/"), int(match[2])) if match else (path, None)


def _open(session: Session, path: str) -> TensorSource:
    """The checkpoint, if every process can open it."""
    source = agreed(lambda: open_source(path, session.config.model))
    agreed(lambda: source.counts)
    return source


def _params(session: Session, source: TensorSource) -> Params:
    return _placed(source, {"params": session.program.abstract_state.params})["params"]


def _placed(source: TensorSource, abstract: Any) -> Any:
    try:
        return place(source, abstract)
    except DamagedCheckpoint as damage:
        raise UserError(f"{source.where} is damaged: {damage}; name another step or checkpoint") from damage
