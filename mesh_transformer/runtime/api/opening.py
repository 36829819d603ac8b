"""Opens the devices of this process, and a model on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import jax

from mesh_transformer import cpu_devices, hub, platforms
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.api.model import Model
from mesh_transformer.runtime.serving.start import MAX_SLOTS
from mesh_transformer.runtime.session.engine import open_engine
from mesh_transformer.runtime.session.generation_defaults import generation_defaults
from mesh_transformer.runtime.session.tokenizer import open_tokenizer
from mesh_transformer.runtime.session.weights import config_of, open_with

# the largest default context; a cache of more is rarely used
MOST_CONTEXT = 4096


def load_model(
    checkpoint: str,
    *,
    mesh: Mapping[str, int] | None,
    dtype: str,
    context: int | None,
    slots: int,
    base: str | None,
    adapter: str | None,
    overrides: Sequence[str],
) -> Model:
    """See `entry.load`."""
    if isinstance(overrides, str):
        raise UserError(f"overrides {overrides!r}: give a list of texts, such as [{overrides!r}]")
    platforms.require_one_process()
    base, adapter = (path and (hub.as_name(path) or path) for path in (base, adapter))
    opened = open_with(hub.as_name(checkpoint) or checkpoint, base, adapter)
    if opened.config is None:
        raise UserError(
            f"{opened.folder} does not record its config: convert it with `mesh-transformer reshard --ckpt "
            f"{opened.path} --config FILE --format native --out FOLDER`, and load FOLDER"
        )
    for name, value in (("slots", slots), ("context", context or 1)):
        if not isinstance(value, int):
            raise UserError(f"{name} {value!r}: must be a whole number")
    if mesh is not None and not isinstance(mesh, Mapping):
        raise UserError(f'mesh {mesh!r}: give the devices of axes, such as {{"tp": 2}}')
    if not 1 <= slots <= MAX_SLOTS:
        raise UserError(f"slots {slots}: must be 1 to {MAX_SLOTS}")
    settings = [*overrides, *(f"mesh.{axis}={json.dumps(size, default=int)}" for axis, size in (mesh or {}).items())]
    config = config_of(None, [*settings, f"compute.dtype={dtype}"], opened)
    if context is not None and not 1 <= context <= config.seq:
        raise UserError(
            f"context {context}: must be 1 to {config.seq}, the model's; a longer one needs "
            f'overrides=["model.seq={context}"]'
        )
    open_devices()
    tokenizer = open_tokenizer(config, opened)
    # read before the weights, because it may have a mistake
    defaults = generation_defaults(opened, "auto")
    engine = open_engine(config, opened, slots=slots, context=context or min(config.seq, MOST_CONTEXT))
    return Model(config, overrides, opened, tokenizer, engine, defaults)


def open_devices() -> None:
    """Open the devices of this process, with threads for virtual ones.

    Raises:
        UserError: there is no such device, or XLA_FLAGS asks for other CPU devices than this process has opened before.
    """
    with platforms.threads_for_devices():
        platforms.open_devices()
    if jax.process_count() > 1:
        raise UserError(
            f"this process is one of {jax.process_count()} of a job: load and fit take one process; use the commands"
        )
    asked = cpu_devices.asked()
    if asked and jax.default_backend() == "cpu" and asked != jax.local_device_count():
        raise UserError(
            f"XLA_FLAGS asks for {asked} devices of the CPU, but JAX has {jax.local_device_count()}: it was started "
            "before XLA_FLAGS was set. Set it before the first use of JAX; in a notebook, restart the kernel and set "
            "it in the first cell"
        )
