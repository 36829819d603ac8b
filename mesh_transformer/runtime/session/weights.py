"""The config and the parameters of the checkpoint that a command names."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from mesh_transformer import files, platforms
from mesh_transformer.checkpoint.identity import warn_of_longer_context
from mesh_transformer.checkpoint.load import fail_together, load, load_by_layer
from mesh_transformer.checkpoint.open import Checkpoint, finished_steps
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint, TensorSource
from mesh_transformer.config import Config, LoraConfig, load_config, parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.infer.cpu.packed import pack
from mesh_transformer.parallel.sharding import Params
from mesh_transformer.runtime.session.session import Session


class LoadedWeights(NamedTuple):
    """The parameters of a checkpoint, in the compute dtype, on the devices, and the step of the checkpoint."""

    params: Params
    step: int


def config_for(
    path: str | None,
    overrides: Sequence[str],
    checkpoint: str | None,
    base: str | None = None,
    adapter: str | None = None,
) -> tuple[Config, Checkpoint]:
    """The config of a command, see `config_of`, and the checkpoint that it reads: the one at `checkpoint`, else the run
    of the config. `base` is where the base of its adapters is now. It gets the adapters at `adapter`.

    Raises:
        UserError: as in `config_of`, or neither `path` nor `checkpoint` is given.
    """
    if checkpoint:
        opened = open_with(checkpoint, base, adapter)
        return config_of(path, overrides, opened), opened
    if path is None and adapter:
        raise UserError(
            f"--adapter {adapter} needs its base: give it with --ckpt BASE; --ckpt {adapter} alone takes the base that "
            "the adapters name"
        )
    if path is None:
        raise UserError(
            "no model is given: use --config FILE, or --ckpt DIR with a checkpoint that records its config, or both"
        )
    # the config may ask the run for its model: it is the same look
    run = functools.cache(lambda root: open_with(root, base, adapter))
    config = load_config(path, overrides, lambda settings: recorded_model_of(run(settings.root)))
    return of_whole_model(config), run(config.checkpoint.root)


def open_with(checkpoint: str, base: str | None, adapter: str | None) -> Checkpoint:
    """The checkpoint at a path, with the adapters at `adapter` if that is given."""
    opened = Checkpoint.open(checkpoint, base=base)
    return opened if adapter is None else Checkpoint.open(adapter, base=opened)


def config_of(path: str | None, overrides: Sequence[str], checkpoint: Checkpoint) -> Config:
    """The config in the file at `path`, or the config that `checkpoint` records, with the `overrides`.

    A checkpoint records the model and the tokenizer. The other options have their defaults. A file without a group
    `model` has the model of the checkpoint.

    Raises:
        UserError: the file or an override is invalid. Or the model is asked for, and there is no checkpoint that
            records it.
    """
    if path is not None:
        return of_whole_model(load_config(path, overrides, lambda _: recorded_model_of(checkpoint)))
    if checkpoint.config is None:
        raise UserError(
            f"{checkpoint.folder} does not record its config: give the config of its run with --config FILE"
        )
    return of_whole_model(parse_config(checkpoint.config, overrides))


def of_whole_model(config: Config) -> Config:
    """The config without the group `lora`: a reader of a checkpoint gets the model with its adapters added."""
    return config.model_copy(update={"lora": LoraConfig()})


def recorded_model_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The values of the group `model` that a checkpoint records.

    Raises:
        UserError: there is no checkpoint, or it does not record its model.
    """
    if checkpoint.config is None:
        raise UserError(f"{checkpoint.folder} does not record its model: give the config the group model")
    return dict(checkpoint.config["model"])


def start_checkpoint(root: str, tuned: Checkpoint | None) -> Checkpoint | None:
    """The checkpoint from which a run starts or resumes: its newest step that can be read, else `tuned`.

    Raises:
        UserError: a step has a config that cannot be read.
    """
    for name in reversed(finished_steps(root)):
        step = Checkpoint.open(files.join(root, name))
        with contextlib.suppress(DamagedCheckpoint):
            # raises if it is damaged
            _ = step.config
            return step
    return tuned


def read_params(session: Session, checkpoint: Checkpoint, *, for_decode: bool = False) -> LoadedWeights:
    """Load the parameters of a checkpoint, without the optimizer state, as `Session.whole_sequences` has them.

    A context longer than the checkpoint's is a warning.

    Args:
        for_decode: use the layout that is fastest for decoding on this platform.

    Raises:
        UserError: there is no checkpoint, it is of another model, or it is damaged.
    """
    source, model = open_checkpoint(session, checkpoint), session.placement.model
    warn_of_longer_context(source, session.config.model)
    abstract = session.whole_sequences.abstract(model.dtype)
    with explain_damage(source):
        if for_decode and jax.default_backend() == "cpu":
            parts = load_by_layer(source, abstract, model.rows_by_layer)
            params = pack(parts, model.decoder)
        else:
            params = load(source, {"params": abstract})["params"]
    platforms.return_freed_memory()
    return LoadedWeights(params, source.counts.step)


def open_checkpoint(session: Session, checkpoint: Checkpoint) -> TensorSource:
    """The tensors of a checkpoint. If a process cannot open it, all processes fail, with the errors of
    `read_params`."""
    if jax.process_count() > 1:
        # processes start at different times, and a run may save in between
        checkpoint = checkpoint.reopened()
    source = fail_together(lambda: checkpoint.source(session.config.model))
    fail_together(lambda: source.counts)
    return source


def load_user_checkpoint(source: TensorSource, abstract: Any) -> Any:
    """Load arrays with `load`. Damage is a UserError, because the user chose the checkpoint."""
    with explain_damage(source):
        return load(source, abstract)


@contextlib.contextmanager
def explain_damage(source: TensorSource) -> Iterator[None]:
    """Turn a DamagedCheckpoint error into a UserError that names the checkpoint."""
    try:
        yield
    except DamagedCheckpoint as damage:
        raise UserError(f"{source.where} is damaged: {damage}; use another step or checkpoint") from damage
