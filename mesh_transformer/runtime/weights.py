"""Parameters and moments of a checkpoint of any form, on a session's devices."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from mesh_transformer.checkpoint.forms import Form, recognise
from mesh_transformer.checkpoint.open import open_found
from mesh_transformer.checkpoint.place import place, place_scalar
from mesh_transformer.checkpoint.store import Checkpoint, CheckpointStore
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
    abstract = {"params": session.program.abstract_state.params}
    found = recognise(path)
    if found.form is Form.NATIVE:
        store, step = _open_store(path)
        restored = _found(store.restore_part(abstract, step), path)
        return Weights(restored.state["params"], restored.step)
    source = open_found(found, session.config.model)
    return Weights(place(source, abstract)["params"], source.counts.step)


def read_weights(session: Session, path: str) -> Weights:
    """Parameters and optimizer state of the checkpoint that `path` names; `opt_state` is None if it has no moments.

    Raises:
        UserError: as in `read_params`.
    """
    found = recognise(path)
    if found.form is not Form.NATIVE:
        return place_weights(session, open_found(found, session.config.model))
    store, step = _open_store(path)
    names = store.names(step)
    if names and not any(name.startswith("opt_state/") for name in names):
        return read_params(session, path)
    restored = _found(store.restore(session.program.abstract_state, step), path)
    return Weights(restored.state.params, restored.step, restored.state.opt_state)


def place_weights(session: Session, source: TensorSource) -> Weights:
    """Everything that an open checkpoint holds, on the devices; errors as in `read_params`."""
    abstract = session.program.abstract_state
    if not has_moments(source):
        return Weights(place(source, {"params": abstract.params})["params"], source.counts.step)
    wanted = {"params": abstract.params, **moments(abstract.opt_state)}
    placed = place(source, wanted)
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


def _found(checkpoint: Checkpoint | None, path: str) -> Checkpoint:
    if checkpoint is None:
        raise UserError(f"no checkpoint in {path}")
    return checkpoint


def _open_store(path: str) -> tuple[CheckpointStore, int | None]:
    """The store and step that a path names: a run's folder (its newest step) or one `step_N` folder in it."""
    root, step = split_step(path)
    return CheckpointStore(root, read_only=True), step
