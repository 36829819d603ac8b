"""Where a run begins: its own newest checkpoint (ours, or of the original program), another one's parameters, or fresh
ones."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import jax

from mesh_transformer.checkpoint.forms import ClassicRun, Form, Found, classic_run
from mesh_transformer.checkpoint.open import open_found
from mesh_transformer.checkpoint.place import place_scalar
from mesh_transformer.checkpoint.store import Checkpoint, CheckpointStore
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import Config
from mesh_transformer.config.names import moved
from mesh_transformer.data.classic_position import classic_position
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log
from mesh_transformer.models.model import Params
from mesh_transformer.runtime.session import Session
from mesh_transformer.runtime.weights import open_agreed, place_named
from mesh_transformer.train import optim
from mesh_transformer.train.step import TrainProgram, TrainState

_NO_RUN = "no run can go on from it. Start from it with --tune-model-path {} and another checkpoint.model_dir"


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


def begin(
    session: Session, program: TrainProgram, store: CheckpointStore, source: Source, logged: Logged
) -> Begun:
    """Resume from `store` if it holds a checkpoint, or from the classic run in its folder; else fine-tune from `source`,
    or start afresh.

    Steps that the metrics file knows and the checkpoint does not are done again, and counted.

    Raises:
        UserError: a checkpoint does not fit the config, or none can be read.
    """
    begun_again = Counters(
        steps_redone=logged.steps_redone + logged.step
    )  # killed before its first checkpoint
    _check_goes_on(store)
    checkpoint = store.restore(program.abstract_state)
    run = None if checkpoint is not None else classic_run(session.config.checkpoint.root)
    if source.tune_model_path and (checkpoint is not None or run is not None):
        log.info("going on with this run; --tune-model-path was read when it began")
    if checkpoint is not None:
        return _resume(session, checkpoint, logged)
    if run is not None:
        return _resume(session, _classic_checkpoint(session, program, run), logged)
    if source.tune_model_path:
        return Begun(_tuned(session, program, source.tune_model_path, source.fresh_opt), 0, begun_again, None)
    return Begun(program.init(jax.random.key(session.config.model.seed)), 0, begun_again, None)


def _check_goes_on(store: CheckpointStore) -> None:
    """Refuse a model_dir whose newest native step was written without moments: by a conversion."""
    names = store.names()
    if names and not any(name.startswith("opt_state/") for name in names):
        folder = store.folder(store.steps()[-1])
        raise UserError(f"{folder} has no Adam moments: {_NO_RUN.format(folder)}")


def _resume(session: Session, checkpoint: Checkpoint, logged: Logged) -> Begun:
    """Go on after a checkpoint of this program, or one that was converted from a run of the original."""
    step, extra = checkpoint.step, checkpoint.extra
    redone = max(0, logged.step - step)
    counters = _counters(extra.get("counters", {"tokens": step * session.tokens_per_step}))
    counters = counters._replace(steps_redone=max(counters.steps_redone, logged.steps_redone) + redone)
    log.info("resuming after step %d; %d steps that were done after it are done again", step, redone)
    if jax.process_index() == 0 and (changes := _changes(extra.get("config"), session.config)):
        log.info("resuming with changed options: %s", ", ".join(changes))
    if session.config.data.restart:
        log.warning("data.restart: reading the training data from its beginning")
        return Begun(checkpoint.state, step, counters, None)
    loader = extra["loader"] if "loader" in extra else _classic_loader(session, extra.get("aux"))
    return Begun(checkpoint.state, step, counters, loader)


def _changes(noted: Any, config: Config) -> list[str]:
    """Each option of the model, its computation, the optimizer and the data that is not as the checkpoint notes it: `optimizer.lr 0.01 -> 0.02`."""
    before, now = moved(noted if isinstance(noted, dict) else {}), config.model_dump(mode="json")
    changes: list[str] = []
    for group in ("model", "compute", "optimizer", "data"):
        old = before.get(group)
        if isinstance(old, dict):
            changes += [
                f"{group}.{name} {json.dumps(old[name])} -> {json.dumps(value)}"
                for name, value in now[group].items()
                if name in old and old[name] != value
            ]
    return changes


def _counters(noted: Any) -> Counters:
    try:
        counters = Counters(**noted)
        if all(type(count) is int and count >= 0 for count in counters):
            return counters
    except TypeError:
        pass
    raise UserError(
        f"the checkpoint notes the counters {str(noted)[:200]}: expected {', '.join(Counters._fields)}, whole numbers. "
        f"Start from it with --tune-model-path and another checkpoint.model_dir"
    )


def _tuned(session: Session, program: TrainProgram, path: str, fresh_opt: bool) -> TrainState:
    """Parameters (and moments, if there are any, unless dropped) of a checkpoint, at step 0 with its schedule at 0."""
    source = open_agreed(session, path)
    params, opt_state = read_state(program, source, moments=not fresh_opt)
    log.info("starting from step %d of %s", source.counts.step, path)
    if opt_state is not None:
        return program.begin(params, optim.restart_schedule(opt_state))
    if not fresh_opt:
        log.info("%s has no Adam moments: they start from zero", path)
    return program.begin(params, program.fresh_optimizer(params))


def read_state(program: TrainProgram, source: TensorSource, *, moments: bool = True) -> tuple[Params, Any]:
    """The parameters of an open checkpoint, and its optimizer state; None if it has no moments, or they are not wanted.

    Raises:
        UserError: it is of another model or damaged.
    """
    abstract = program.abstract_state
    if not (moments and has_moments(source)):
        return place_named(source, {"params": abstract.params})["params"], None
    placed = place_named(source, {"params": abstract.params, **optim.moments(abstract.opt_state)})
    counts = (
        place_scalar(count or 0, abstract.step) for count in (source.counts.adam, source.counts.schedule)
    )
    return placed["params"], optim.with_moments(abstract.opt_state, placed, *counts)


def has_moments(source: TensorSource) -> bool:
    """Whether a checkpoint holds Adam's moments."""
    return any(name.startswith("mu/") for name in source.tensors)


def _classic_checkpoint(session: Session, program: TrainProgram, run: ClassicRun) -> Checkpoint:
    """The state of a run of the original program: its step, moments and schedule."""
    source = open_found(Found(Form.CLASSIC, run.folder), session.config.model)
    if not has_moments(source):
        raise UserError(
            f"{run.folder} is a slim checkpoint, without Adam's moments: {_NO_RUN.format(run.folder)}"
        )
    log.info("going on with a run of the original program; new checkpoints are native, its own stay")
    step = source.counts.step
    state = program.begin(*read_state(program, source))
    skipped = max(0, step - (source.counts.schedule or 0))
    abstract = program.abstract_state
    state = state._replace(
        step=place_scalar(step, abstract.step), skipped=place_scalar(skipped, abstract.skipped)
    )
    return Checkpoint(step, state, {"aux": run.aux})


def _classic_loader(session: Session, aux: Any) -> dict[str, Any] | None:
    """The position in the training data that the original noted beside a step, as one of ours."""
    data, noted = session.config.data, aux.get("train_loader") if isinstance(aux, dict) else None
    if data.train_set is None:
        return None
    if noted is None:
        log.warning("the checkpoint notes no position in the training data: reading from the beginning")
        return None
    return classic_position(data.train_set, noted, session.sequences_per_step)
