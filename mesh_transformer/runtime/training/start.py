"""The state at the start of a run: its newest checkpoint, parameters of another checkpoint, or new parameters."""

import dataclasses
import json
from typing import Any, NamedTuple

import jax

from mesh_transformer.checkpoint.adapters import BaseSource
from mesh_transformer.checkpoint.classic.format import ClassicRun, ClassicStep, classic_run
from mesh_transformer.checkpoint.format import Folder
from mesh_transformer.checkpoint.identity import check_optimizer
from mesh_transformer.checkpoint.load import fail_together, put_scalar
from mesh_transformer.checkpoint.lora_record import LoraRecord
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.checkpoint.origin import Origin, read_origin
from mesh_transformer.checkpoint.store import Checkpoint as RestoredCheckpoint
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.checkpoint.tensors import TensorSource, slots
from mesh_transformer.data.batches.classic_position import classic_position
from mesh_transformer.data.batches.mixture import position_at
from mesh_transformer.data.records.stamps import or_restart
from mesh_transformer.errors import UserError, plural, set_options
from mesh_transformer.logs import log
from mesh_transformer.parallel.sharding import Params
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.session.weights import load_user_checkpoint, open_checkpoint
from mesh_transformer.runtime.training.provenance import KEY, Provenance
from mesh_transformer.runtime.training.start_adapters import OtherAdapters
from mesh_transformer.runtime.training.tokenizers import warn_of_other_tokens
from mesh_transformer.spec import Lora
from mesh_transformer.train.optimizer import OptState
from mesh_transformer.train.step import TrainProgram, TrainState, stored

# what a checkpoint notes if a signal interrupted the validation after its step
VALIDATION_DUE = "validation_due"


@dataclasses.dataclass(frozen=True)
class TuningSource:
    """The options --tune-model-path, --fresh-opt and --adapter of a fine-tuning run."""

    tune_model_path: str | None = None
    fresh_opt: bool = False
    adapter: str | None = None


class Counters(NamedTuple):
    """Counters that continue after a restart."""

    tokens: int = 0
    steps_redone: int = 0


class LoggedProgress(NamedTuple):
    """The last record of the metrics file: its step, and its count of repeated steps."""

    step: int = 0
    steps_redone: int = 0


class StartPoint(NamedTuple):
    """The state at the start of training.

    Args:
        loader_state: the position in the training data. None: its beginning.
        origin: the Hugging Face folder that the run started from, if any.
        validates: whether the run begins with the validation after `step`: a signal interrupted it, or a fine-tuning
            starts.
        provenance: of the steps before it, if the checkpoint has it.
        lora: the base and the adapters of a run with `lora`.
    """

    state: TrainState
    step: int
    counters: Counters
    loader_state: dict[str, Any] | None
    origin: Origin | None = None
    validates: bool = False
    provenance: Provenance | None = None
    lora: LoraRecord | None = None


def resume_or_start(
    session: Session,
    program: TrainProgram,
    store: CheckpointStore,
    source: TuningSource,
    logged: LoggedProgress,
) -> StartPoint:
    """Resume the run, or start it.

    It resumes from the newest checkpoint in `store`, or from a run of the original program in the same folder. Without
    one, it starts from the parameters of `source`, or from new ones. Steps in the metrics file after the checkpoint are
    counted as repeated steps.

    Raises:
        UserError: a checkpoint does not fit the config, or no checkpoint can be read.
    """
    rank = session.config.lora.rank
    checkpoint = store.restore(stored(program.abstract_state))
    if checkpoint is None and (run := classic_run(session.config.checkpoint.root)) is not None:
        if rank:
            raise UserError(
                f"{run.folder} is of a run of all parameters, and the config has lora.rank {rank}: choose another "
                "checkpoint.model_dir, and give this one with --tune-model-path"
            )
        checkpoint = _classic_checkpoint(session, program, run)
    if checkpoint is not None:
        if source.tune_model_path and not rank:
            log.info("resuming this run: --tune-model-path is used at the first start only")
        record = LoraRecord.of(checkpoint.extra, store.folder(checkpoint.step))
        if rank and record is None:
            raise UserError(f"{store.folder(checkpoint.step)} has adapters, and does not record their base")
        if record is not None:
            state, record = _with_base(session, program, checkpoint, record, source.tune_model_path)
            checkpoint = checkpoint._replace(state=state)
        origin = read_origin(store.folder(checkpoint.step), checkpoint.extra)
        validates = checkpoint.extra.get(VALIDATION_DUE) is True
        return _resume(session, checkpoint, logged)._replace(origin=origin, validates=validates, lora=record)
    # steps in the metrics file without a checkpoint: the run ended before its first checkpoint
    counters = Counters(steps_redone=logged.steps_redone + logged.step)
    if source.tune_model_path:
        _note_z_loss(session)
        if rank:
            return _adapted(session, program, source.tune_model_path, source.adapter)._replace(counters=counters)
        state, origin = _tuned(session, program, source.tune_model_path, source.fresh_opt)
        return StartPoint(state, 0, counters, None, origin, validates=True)
    if rank:
        raise UserError(
            f"lora.rank {rank} adapts a trained model: give its checkpoint with --tune-model-path, "
            "or remove the group lora to train a new model"
        )
    log.info("compiling: initial parameters")
    return StartPoint(program.init(jax.random.key(session.config.model.seed)), 0, counters, None)


def _note_z_loss(session: Session) -> None:
    """Log what a fine-tuning has in its loss besides the cross entropy."""
    optimizer = session.config.optimizer
    logit = "logit - largest logit" if optimizer.z_loss_kind == "classic" else "logit"
    if optimizer.z_loss and jax.process_index() == 0:
        log.info(
            "optimizer.z_loss adds %g x log(sum(exp(%s)))^2 to the cross entropy, which the loss of transformers does "
            "not have: %s leaves it out",
            *(optimizer.z_loss, logit, set_options("optimizer.z_loss=0")),
        )


def _resume(session: Session, checkpoint: RestoredCheckpoint, logged: LoggedProgress) -> StartPoint:
    """Resume from a checkpoint of this program, or from one that was converted from a run of the original program."""
    step, extra = checkpoint.step, checkpoint.extra
    redone = max(0, logged.step - step)
    counters = _counters(extra.get("counters", {"tokens": step * session.tokens_per_step}))
    counters = counters._replace(steps_redone=max(counters.steps_redone, logged.steps_redone) + redone)
    log.info("resuming after step %d; repeating %s", step, plural(redone, "step"))
    if jax.process_index() == 0 and (changes := _changes(extra, session)):
        log.info("resuming with changed options: %s", ", ".join(changes))
    provenance = _note_differences(session, step, extra)
    # the weights of a mixture follow the step of the run
    beginning = position_at(step) if session.config.data.reads_any_record else None
    if session.config.data.restart:
        log.warning("data.restart: reading the training data from its beginning")
        return StartPoint(checkpoint.state, step, counters, beginning, provenance=provenance)
    loader = extra["loader"] if "loader" in extra else _classic_loader(session, extra.get("aux"))
    loader = beginning if loader is None else loader
    return StartPoint(checkpoint.state, step, counters, loader, provenance=provenance)


def _note_differences(session: Session, step: int, extra: dict[str, Any]) -> Provenance | None:
    """Log what decides the bits of a step and is not as it was before the checkpoint, whose provenance it returns.
    Checkpoints of 50565e5 have none."""
    before = Provenance.recorded(extra)
    if jax.process_index() or KEY not in extra:
        return before
    if before is None:
        log.warning("step %d: the record of versions and of options with auto cannot be read, and is not used", step)
    elif differences := before.differences(Provenance.of(session, documents=before.documents)):
        log.info(
            "since step %d this has changed: %s; the steps will not be equal in bits to a run without a stop",
            *(step, ", ".join(differences)),
        )
    return before


def _changes(extra: dict[str, Any], session: Session) -> list[str]:
    """The options that differ from the config in the checkpoint, such as `optimizer.lr 0.01 -> 0.02`, and the axes of
    the mesh of all devices, which the config may leave open."""
    recorded, mesh = extra.get("config"), extra.get("mesh")
    before, now = dict(recorded) if isinstance(recorded, dict) else {}, session.config.model_dump(mode="json")
    if isinstance(before.get("mesh"), dict) and isinstance(mesh, dict):
        before, now["mesh"] = {**before, "mesh": {**before["mesh"], **mesh}}, {**now["mesh"], **session.shape}
    if isinstance(before.get("optimizer"), dict):
        # a record without it is of a version that had no other
        before["optimizer"] = {"schedule": "cosine", **before["optimizer"]}
    return [
        f"{group}.{name} {json.dumps(old[name])} -> {json.dumps(value)}"
        for group in ("model", "compute", "experts", "lora", "optimizer", "data", "mesh")
        if isinstance(old := before.get(group), dict)
        for name, value in now[group].items()
        if name in old and old[name] != value
    ]


def _counters(recorded: Any) -> Counters:
    try:
        counters = Counters(**recorded)
        if all(type(count) is int and count >= 0 for count in counters):
            return counters
    except TypeError:
        pass
    raise UserError(
        f"the checkpoint has the counters {str(recorded)[:200]}: expected whole numbers for "
        f"{', '.join(Counters._fields)}. To use its parameters, start a run with --tune-model-path and another "
        "checkpoint.model_dir"
    )


def _tuned(session: Session, program: TrainProgram, path: str, fresh_opt: bool) -> tuple[TrainState, Origin | None]:
    """The state at step 0 with the parameters of a checkpoint, and its optimizer state unless `fresh_opt` is set.

    Also returns the Hugging Face folder that the checkpoint is or came from.
    """
    checkpoint = Checkpoint.open(path)
    source = open_checkpoint(session, checkpoint)
    if jax.process_index() == 0:
        warn_of_other_tokens(session.config.data, checkpoint)
    origin = fail_together(lambda: checkpoint.origin(source))
    abstract = program.abstract_state
    log.info("starting from step %d of %s", source.counts.step, path)
    if slots(source) and not fresh_opt:
        params, opt_state = read_state(program, source)
        return program.begin(params, {**opt_state, "schedule": put_scalar(0, abstract.step)}, {}), origin
    if not fresh_opt:
        log.info("%s has no %s moments: they start from zero", path, program.config.optimizer.name.capitalize())
    params = load_user_checkpoint(source, {"params": abstract.params})["params"]
    return program.begin(params, program.fresh_optimizer(params), {}), origin


def _adapted(session: Session, program: TrainProgram, path: str, adapter: str | None) -> StartPoint:
    """The start of a run that trains adapters of the checkpoint at `path`: its frozen parameters, and new adapters or
    those at `adapter`."""
    checkpoint = Checkpoint.open(path)
    source = open_checkpoint(session, checkpoint)
    if jax.process_index() == 0:
        warn_of_other_tokens(session.config.data, checkpoint)
    origin = fail_together(lambda: checkpoint.origin(source))
    if slots(source):
        log.info("%s has optimizer state, which adapters do not use", path)
    log.info("starting from step %d of %s", source.counts.step, path)
    forms, model = session.config.decoder.forms, session.config.model
    adapters = tuple(adapter for form in forms if isinstance(form, Lora) for adapter in form.adapters)
    others = None if adapter is None else OtherAdapters.open(adapter, model, adapters)
    base = BaseSource(source, model)
    frozen, digest = _read_base(program, base)
    place = fail_together(lambda: checkpoint.place)
    params = program.fresh_params(jax.random.key(model.seed))
    if others is not None:
        params = others.begin(params, base)
    state = program.begin(params, program.fresh_optimizer(params), frozen)
    record = LoraRecord(place, digest, adapters)
    return StartPoint(state, 0, Counters(), None, origin, validates=True, lora=record)


def _with_base(
    session: Session,
    program: TrainProgram,
    checkpoint: RestoredCheckpoint,
    record: LoraRecord,
    tune_model_path: str | None,
) -> tuple[TrainState, LoraRecord]:
    """The state of a checkpoint of adapters with the frozen parameters of its base, and the record with the place of
    the base: where the run read it, else `tune_model_path`.

    Raises:
        UserError: the base is gone, or is not the one with which the run began.
    """
    model, where = session.config.model, f"step {checkpoint.step}"
    opened = fail_together(lambda: _find_base(record.base, tune_model_path, where))
    base = BaseSource(open_checkpoint(session, opened), model)
    frozen, digest = _read_base(program, base)
    if digest != record.hash:
        raise UserError(
            f"the run began with {record.base}, a base of hash {record.hash}, and {base.where} has {digest}: restore "
            "that base, give its place with --tune-model-path, or choose another checkpoint.model_dir"
        )
    return checkpoint.state._replace(frozen=frozen), record._replace(base=fail_together(lambda: opened.place))


def _find_base(recorded: str, tune_model_path: str | None, where: str) -> Checkpoint:
    """The checkpoint at the recorded place, if there is one, else at `tune_model_path`."""
    checkpoint = Checkpoint.open(recorded)
    try:
        _ = checkpoint.format
    except UserError as error:
        if tune_model_path is None:
            raise UserError(
                f"the base of {where}, {recorded}, cannot be opened: {error}; --tune-model-path DIR says where it is"
            ) from error
        return Checkpoint.open(tune_model_path)
    return checkpoint


def _read_base(program: TrainProgram, base: BaseSource) -> tuple[Params, str]:
    """The frozen parameters of a base in the compute dtype, and the base's hash."""
    log.info("reading %s", base.where)
    frozen = load_user_checkpoint(base, {"params": program.abstract_state.frozen})["params"]
    if base.hash is None:
        raise UserError(f"{base.where} lacks parameters of the model: give the checkpoint of a whole model")
    return frozen, base.hash


def read_state(program: TrainProgram, source: TensorSource) -> tuple[Params, OptState]:
    """Load the parameters and the optimizer state of an open checkpoint.

    Raises:
        UserError: the checkpoint is of another model or optimizer, has no optimizer state, or is damaged.
    """
    optimizer, abstract = program.config.optimizer, program.abstract_state
    check_optimizer(source, optimizer)
    placed = load_user_checkpoint(
        source, {"params": abstract.params, **{slot: abstract.opt_state[slot] for slot in optimizer.slots}}
    )
    counts = {"count": source.counts.optimizer, "schedule": source.counts.schedule}
    scalars = {name: put_scalar(count or 0, abstract.step) for name, count in counts.items()}
    return placed.pop("params"), {**placed, **scalars}


def _classic_checkpoint(session: Session, program: TrainProgram, run: ClassicRun) -> RestoredCheckpoint:
    """A checkpoint from a run of the original program: its parameters, optimizer state and step."""
    source = ClassicStep(Folder(run.folder)).source(session.config.model)
    state = program.begin(*read_state(program, source), {})
    log.info("resuming a run of the original program: new checkpoints have the native format, its own checkpoints stay")
    step = source.counts.step
    skipped = max(0, step - (source.counts.schedule or 0))
    abstract = program.abstract_state
    state = state._replace(step=put_scalar(step, abstract.step), skipped=put_scalar(skipped, abstract.skipped))
    return RestoredCheckpoint(step, state, {"aux": run.aux})


def _classic_loader(session: Session, aux: Any) -> dict[str, Any] | None:
    """The position in the training data that the original program stored with a step, in the format of our loader."""
    data, recorded = session.config.data, aux.get("train_loader") if isinstance(aux, dict) else None
    if data.train_set is None:
        return None
    if recorded is None:
        log.warning("the checkpoint has no position in the training data: reading the data from its beginning")
        return None
    if not isinstance(data.train_set, str):
        raise UserError(
            "the original program had read one set, and data.train_set is a mixture: restore the former set, "
            + or_restart()
        )
    return classic_position(data.train_set, recorded, session.sequences_per_step)
