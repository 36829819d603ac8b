"""Where a run begins: its own newest checkpoint, another run's parameters, or fresh ones."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import jax

from mesh_transformer.checkpoint.store import Checkpoint, CheckpointStore
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log
from mesh_transformer.models.base import Params
from mesh_transformer.runtime.session import Session
from mesh_transformer.train.optim import restart_schedule
from mesh_transformer.train.step import TrainState


@dataclasses.dataclass(frozen=True)
class Source:
    """The --tune-model-path and --fresh-opt of a fine-tuning run."""

    tune_model_path: str | None = None
    fresh_opt: bool = False


class Counters(NamedTuple):
    """Counts that outlive a restart."""

    tokens: int = 0
    steps_redone: int = 0


class Logged(NamedTuple):
    """The end of the metrics file: its last step, and the steps that had been done again by then."""

    step: int = 0
    steps_redone: int = 0


class Begun(NamedTuple):
    """The state to go on from."""

    state: TrainState
    step: int
    counters: Counters
    loader_state: dict[str, Any] | None  # None: read from the beginning


def begin(session: Session, store: CheckpointStore, source: Source, logged: Logged) -> Begun:
    """Resume from `store` if it holds a checkpoint; else fine-tune from `source`, or start afresh.

    Steps that the metrics file knows and the checkpoint does not are done again, and counted.

    Raises:
        UserError: a checkpoint does not fit the config, or none can be read.
    """
    program = session.program
    checkpoint = store.restore(program.abstract_state)
    if checkpoint is not None:
        if source.tune_model_path:
            log.info("going on with this run; --tune-model-path was read when it began")
        return _resume(session, checkpoint.state, checkpoint.step, checkpoint.extra, logged)
    if source.tune_model_path:
        return Begun(_tuned(session, source.tune_model_path, source.fresh_opt), 0, Counters(), None)
    return Begun(program.init(jax.random.key(session.config.model.seed)), 0, Counters(), None)


def _resume(session: Session, state: TrainState, step: int, extra: dict[str, Any], logged: Logged) -> Begun:
    redone = max(0, logged.step - step)
    counters = Counters(**extra["counters"])
    counters = counters._replace(steps_redone=max(counters.steps_redone, logged.steps_redone) + redone)
    log.info("resuming after step %d; %d steps that were done after it are done again", step, redone)
    if session.config.data.restart:
        log.warning("data.restart: reading the training data from its beginning")
    return Begun(state, step, counters, None if session.config.data.restart else extra["loader"])


def _tuned(session: Session, path: str, fresh_opt: bool) -> TrainState:
    """Parameters (and moments, unless dropped) of another run, at step 0 with its schedule at 0."""
    program = session.program
    if fresh_opt:
        params = read_params(session, path).params
        opt_state = program.fresh_optimizer(params)
    else:
        store, step = open_checkpoint(path)
        restored = _found(store.restore(program.abstract_state, step), path)
        params, opt_state = restored.state.params, restart_schedule(restored.state.opt_state)
    return program.begin(params, opt_state)


class Weights(NamedTuple):
    """The parameters of a checkpoint, float32, on their devices."""

    params: Params
    step: int


def read_params(session: Session, path: str) -> Weights:
    """The parameters alone, without the moments, of the checkpoint that `path` names.

    Raises:
        UserError: there is no checkpoint, or it is of another model or damaged.
    """
    store, step = open_checkpoint(path)
    abstract = {"params": session.program.abstract_state.params}
    restored = _found(store.restore_part(abstract, step), path)
    return Weights(restored.state["params"], restored.step)


def _found(checkpoint: Checkpoint | None, path: str) -> Checkpoint:
    if checkpoint is None:
        raise UserError(f"no checkpoint in {path}")
    return checkpoint


def split_step(path: str) -> tuple[str, int | None]:
    """The run's folder and the step of `run/step_N`; for any other path, itself and None."""
    path = path.rstrip("/")
    match = re.fullmatch(r"(.*/)?step_(\d+)", path)
    return ((match[1] or "./").rstrip("/"), int(match[2])) if match else (path, None)


def open_checkpoint(path: str) -> tuple[CheckpointStore, int | None]:
    """The store and step that a path names: a run's folder (its newest step) or one `step_N` folder in it.

    Raises:
        UserError: there is no checkpoint.
    """
    root, step = split_step(path)
    store = CheckpointStore(root, read_only=True)
    steps = store.steps()
    if not steps or (step is not None and step not in steps):
        raise UserError(f"no checkpoint in {path}: expected a folder with step_N folders, or one of those")
    return store, step
