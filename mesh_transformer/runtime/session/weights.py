"""What a command takes from the checkpoint that it names: its config, and its parameters on a session's devices."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from mesh_transformer import platforms
from mesh_transformer.checkpoint.load import fail_together, load, load_by_layer
from mesh_transformer.checkpoint.open import find_checkpoint, open_source, recorded_config
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint, TensorSource
from mesh_transformer.config import Config, load_config, parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.families.spec import Decoder
from mesh_transformer.models.decoder import same_input
from mesh_transformer.models.model import Params
from mesh_transformer.ops.linear import PackedBlock
from mesh_transformer.runtime.session.session import Session


class Weights(NamedTuple):
    """The parameters of a checkpoint, in the compute dtype, on their devices, and its step."""

    params: Params
    step: int


def config_for(path: str | None, overrides: Sequence[str], checkpoint: str | None) -> Config:
    """The config file at `path` with the `overrides`; without a file, the model and the tokenizer that `checkpoint` notes,
    defaults for everything else, and the `overrides`.

    Raises:
        UserError: the file or an override cannot be used; without a file: no checkpoint is named, there is none, or it does
            not know its model.
    """
    if path is not None:
        return load_config(path, overrides)
    if checkpoint is None:
        raise UserError("no model is named: give --config FILE, or --ckpt DIR that knows its model, or both")
    found = find_checkpoint(checkpoint)
    noted = recorded_config(found)
    if noted is None:
        raise UserError(f"{found.path} does not note its model: give the config of its run, --config FILE")
    return parse_config(noted, overrides)


def read_params(session: Session, path: str, *, for_decode: bool = False) -> Weights:
    """The parameters alone, without the moments, of the checkpoint that `path` names.

    Args:
        for_decode: in the layout in which this platform multiplies few rows.

    Raises:
        UserError: there is no checkpoint, or it is of another model or damaged.
    """
    source, model = open_agreed(session, path), session.placement.model
    abstract = session.placement.abstract(model.dtype)
    with damage_named(source):
        if for_decode and jax.default_backend() == "cpu":
            parts = load_by_layer(source, abstract)
            params = pack_for_cpu_decode(parts, model.decoder)
        else:
            params = load(source, {"params": abstract})["params"]
    platforms.return_freed_memory()
    return Weights(params, source.counts.step)


def pack_for_cpu_decode(parts: Iterable[tuple[str, Params]], decoder: Decoder) -> Params:
    """Parameters for few rows on CPU: "blocks" is a tuple of packed layers, and the head's matrix is transposed.

    XLA for CPU takes a layer out of a stack by copying it, at every step. The last layer's matrices are not joined: most of
    them are applied to one position of a prompt only. Each part is packed before the next one is read.

    Args:
        parts: as `load_by_layer` gives them.
    """
    params: Params = {"blocks": ()}
    for stage, part in parts:
        if stage == "blocks":
            joined = same_input(decoder) if len(params["blocks"]) < len(decoder.layers) - 1 else ()
            params["blocks"] += (jax.block_until_ready(PackedBlock.pack(part, joined)),)
        else:
            params[stage] = PackedBlock.pack(part, ()).unpack() if stage == "head" else part
        del part  # before the next one is read
    return params


def split_step(path: str) -> tuple[str, int | None]:
    """The run's folder and the step of `run/step_N`; for any other path, itself and None."""
    path = path.rstrip("/")
    match = re.fullmatch(r"(.*/)?step_(\d+)", path)
    return ((match[1] or "./").rstrip("/"), int(match[2])) if match else (path, None)


def open_agreed(session: Session, path: str) -> TensorSource:
    """The checkpoint, if every process can open it; errors as in `read_params`."""
    source = fail_together(lambda: open_source(path, session.config.model))
    fail_together(lambda: source.counts)
    return source


def load_named(source: TensorSource, abstract: Any) -> Any:
    """As `load`, of a checkpoint that the user named: a UserError says where it is damaged."""
    with damage_named(source):
        return load(source, abstract)


@contextlib.contextmanager
def damage_named(source: TensorSource) -> Iterator[None]:
    """What is found damaged inside is the checkpoint that the user named: a UserError says so."""
    try:
        yield
    except DamagedCheckpoint as damage:
        raise UserError(f"{source.where} is damaged: {damage}; name another step or checkpoint") from damage
