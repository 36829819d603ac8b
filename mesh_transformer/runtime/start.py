"""Where a run begins: its own newest checkpoint (ours, or of the original program), another one's parameters, or fresh
ones."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from mesh_transformer.checkpoint.forms import ClassicRun, Form, Found, classic_run
from mesh_transformer.checkpoint.open import open_found
from mesh_transformer.checkpoint.place import place_scalar
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.data.classic_position import classic_position
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log
from mesh_transformer.runtime.session import Session
from mesh_transformer.runtime.weights import has_moments, place_weights, read_params, read_weights
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
    """Resume from `store` if it holds a checkpoint, or from the classic run in its folder; else fine-tune from `source`,
    or start afresh.

    Steps that the metrics file knows and the checkpoint does not are done again, and counted.

    Raises:
        UserError: a checkpoint does not fit the config, or none can be read.
    """
    program = session.program
    begun_again = Counters(
        steps_redone=logged.steps_redone + logged.step
    )  # killed before its first checkpoint
    checkpoint = store.restore(program.abstract_state)
    if checkpoint is not None:
        if source.tune_model_path:
            log.info("going on with this run; --tune-model-path was read when it began")
        return _resume(session, checkpoint.state, checkpoint.step, checkpoint.extra, logged)
    if run := classic_run(session.config.checkpoint.root):
        return _resume_classic(session, run, logged)
    if source.tune_model_path:
        return Begun(_tuned(session, source.tune_model_path, source.fresh_opt), 0, begun_again, None)
    return Begun(program.init(jax.random.key(session.config.model.seed)), 0, begun_again, None)


def _resume(session: Session, state: TrainState, step: int, extra: dict[str, Any], logged: Logged) -> Begun:
    redone = max(0, logged.step - step)
    counters = Counters(**extra["counters"])
    counters = counters._replace(steps_redone=max(counters.steps_redone, logged.steps_redone) + redone)
    log.info("resuming after step %d; %d steps that were done after it are done again", step, redone)
    if session.config.data.restart:
        log.warning("data.restart: reading the training data from its beginning")
    return Begun(state, step, counters, None if session.config.data.restart else extra["loader"])


def _tuned(session: Session, path: str, fresh_opt: bool) -> TrainState:
    """Parameters (and moments, if there are any, unless dropped) of a checkpoint, at step 0 with its schedule at 0."""
    program = session.program
    weights = read_params(session, path) if fresh_opt else read_weights(session, path)
    log.info("starting from step %d of %s", weights.step, path)
    if weights.opt_state is not None:
        return program.begin(weights.params, restart_schedule(weights.opt_state))
    if not fresh_opt:
        log.info("%s has no Adam moments: they start from zero", path)
    return program.begin(weights.params, program.fresh_optimizer(weights.params))


def _resume_classic(session: Session, run: ClassicRun, logged: Logged) -> Begun:
    """Go on with a run of the original program: its step, moments, schedule and place in the data."""
    source = open_found(Found(Form.CLASSIC, run.folder), session.config.model)
    if not has_moments(source):
        raise UserError(
            f"{run.folder} is a slim checkpoint, without Adam's moments: its run cannot go on. Start from it with "
            f"--tune-model-path {run.folder} and another checkpoint.model_dir"
        )
    log.info("going on with a run of the original program; new checkpoints are native, its own stay")
    loader = _classic_loader(session, run)
    weights, step = place_weights(session, source), source.counts.step
    state = session.program.begin(weights.params, weights.opt_state)
    skipped = max(0, step - (source.counts.schedule or 0))
    abstract = session.program.abstract_state
    state = state._replace(
        step=place_scalar(step, abstract.step), skipped=place_scalar(skipped, abstract.skipped)
    )
    extra = {"counters": Counters(tokens=step * session.tokens_per_step)._asdict(), "loader": loader}
    return _resume(session, state, step, extra, logged)


def _classic_loader(session: Session, run: ClassicRun) -> dict[str, Any] | None:
    """The position in the training data that the original noted, as one of ours."""
    noted, data = run.aux.get("train_loader"), session.config.data
    if data.restart or data.train_set is None:
        return None
    if noted is None:
        log.warning("%s: meta.json has no data position: reading from the beginning", run.folder)
        return None
    return classic_position(data.train_set, noted, session.sequences_per_step)
