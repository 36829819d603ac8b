"""The config and the parameters of the checkpoint that a command names."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from mesh_transformer import files, platforms
from mesh_transformer.checkpoint.identity import warn_of_longer_context
from mesh_transformer.checkpoint.load import fail_together, load, load_by_layer
from mesh_transformer.checkpoint.open import Checkpoint, finished_steps
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint, TensorSource
from mesh_transformer.config import Config, load_config, parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.infer.cpu.packed import pack
from mesh_transformer.parallel.sharding import Params
from mesh_transformer.runtime.session.session import Session


class Weights(NamedTuple):
    """The parameters of a checkpoint, in the compute dtype, on the devices, and the step of the checkpoint."""

    params: Params
    step: int


def config_for(path: str | None, overrides: Sequence[str], checkpoint: str | None) -> Config:
    """The config of a command: the file at `path`, or the config that `checkpoint` records, with the `overrides`.

    A checkpoint records the model and the tokenizer. The other options have their defaults. A file without a group
    `model` has the model of the checkpoint: `checkpoint`, or the run of the file.

    Raises:
        UserError: the file or an override is invalid. Or there is no `path`, and no checkpoint that records its config.
    """
    if path is not None:
        return load_config(path, overrides, lambda settings: recorded_model_of(checkpoint or settings.root))
    if checkpoint is None:
        raise UserError(
            "no model is given: use --config FILE, or --ckpt DIR with a checkpoint that records its config, or both"
        )
    opened = Checkpoint.open(checkpoint)
    if opened.config is None:
        raise UserError(f"{opened.folder} does not record its config: give the config of its run with --config FILE")
    return parse_config(opened.config, overrides)


def recorded_model_of(checkpoint: str) -> dict[str, Any]:
    """The values of the group `model` that a checkpoint records.

    Raises:
        UserError: there is no checkpoint, or it does not record its model.
    """
    opened = Checkpoint.open(checkpoint)
    if opened.config is None:
        raise UserError(f"{opened.folder} does not record its model: give the config the group model")
    return dict(opened.config["model"])


def start_checkpoint(root: str, tune_model_path: str | None) -> str | None:
    """The checkpoint from which a run starts or resumes: its newest step that can be read, else `tune_model_path`.

    Raises:
        UserError: a step has a config that cannot be read.
    """
    for name in reversed(finished_steps(root)):
        step = files.join(root, name)
        with contextlib.suppress(DamagedCheckpoint):
            # it is read for its errors alone
            _ = Checkpoint.open(step).config
            return step
    return tune_model_path


def read_params(session: Session, path: str, *, for_decode: bool = False) -> Weights:
    """Load the parameters of the checkpoint at `path`, without the optimizer state, as `Session.whole_sequences` has
    them.

    A context longer than the checkpoint's is a warning.

    Args:
        for_decode: use the layout that is fastest for decoding on this platform.

    Raises:
        UserError: there is no checkpoint, it is of another model, or it is damaged.
    """
    source, model = open_checkpoint(session, path), session.placement.model
    warn_of_longer_context(source, session.config.model)
    abstract = session.whole_sequences.abstract(model.dtype)
    with explain_damage(source):
        if for_decode and jax.default_backend() == "cpu":
            parts = load_by_layer(source, abstract, model.rows_by_layer)
            params = pack(parts, model.decoder)
        else:
            params = load(source, {"params": abstract})["params"]
    platforms.return_freed_memory()
    return Weights(params, source.counts.step)


def open_checkpoint(session: Session, path: str) -> TensorSource:
    """Open a checkpoint. If a process cannot open it, all processes fail, with the errors of `read_params`."""
    source = fail_together(lambda: Checkpoint.open(path).source(session.config.model))
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
