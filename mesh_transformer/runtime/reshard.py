"""The work of slim_model.py and resharding_example.py: a config and a checkpoint to a step in another form or split."""

from collections.abc import Sequence

import jax
import ml_dtypes
import numpy as np

from mesh_transformer import logs, platforms
from mesh_transformer.checkpoint.classic_folder import check_shards
from mesh_transformer.checkpoint.open import Form, open_found, open_step, recognise
from mesh_transformer.config import is_set
from mesh_transformer.errors import UserError
from mesh_transformer.files import join
from mesh_transformer.runtime import sampler
from mesh_transformer.runtime.configs import config_for
from mesh_transformer.runtime.convert import write_step
from mesh_transformer.runtime.weights import split_step


def slim(
    config_path: str | None,
    overrides: Sequence[str],
    *,
    checkpoint: str | None = None,
    step: int | None = None,
    f16: bool = False,
    overwrite: bool = False,
) -> None:
    """Write the parameters of a run's checkpoint, in half precision, to `{root}_slim/step_N` (or `_slim_f16`).

    The result is classic, in mesh.tp shards.

    Args:
        checkpoint: the run's folder or one of its steps; None: the run of the config.

    Raises:
        UserError: there is no checkpoint of that step, or it does not fit the config, or the target is there.
    """
    logs.set_up()
    config = config_for(config_path, overrides, checkpoint)
    root, named = split_step(checkpoint or config.checkpoint.root)
    if None not in (named, step):
        raise UserError(f"{checkpoint} names a step, and --ckpt-step {step} too: leave one of them out")
    source = open_step(root, config.model, step if named is None else named)
    write_step(
        source,
        config.model,
        join(root + ("_slim_f16" if f16 else "_slim"), f"step_{source.counts.step}"),
        form=Form.CLASSIC,
        shards=config.mesh.tp,
        full=False,
        dtype=np.dtype(np.float16 if f16 else ml_dtypes.bfloat16),
        overwrite=overwrite,
    )


def reshard(
    config_path: str | None,
    overrides: Sequence[str],
    *,
    checkpoint: str,
    shards_out: int | None,
    output: str | None,
    form: Form | str,
    prompt: str | None,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint of any form to `output`, with its moments if it has them, and complete `prompt` with the result.

    Everything that can be refused is refused before anything is written.

    Args:
        shards_out: of a classic result, and devices for the prompt; None: mesh.tp of the config.
        output: see `write_step`. None: nothing is written, and the prompt is answered by the checkpoint itself.

    Raises:
        UserError: neither is asked for, or the checkpoint does not fit the config or the shards, or `output` is there, or
            the prompt cannot be completed on these devices.
    """
    form = Form(form)
    if output is None and prompt is None:
        raise UserError("nothing to do: give --out FOLDER, --prompt TEXT or both")
    logs.set_up()
    config = config_for(config_path, overrides, checkpoint)
    _check_shards_out(shards_out, overrides, form, prompt)
    shards = config.mesh.tp if shards_out is None else shards_out
    if output is not None and form is Form.CLASSIC:
        check_shards(config.model, shards, output)
    found = recognise(checkpoint)
    if output is not None and form is Form.NATIVE and found.form is Form.NATIVE:
        raise UserError(
            f"{found.folder} is native already, for any number of devices: copy the folder as it is"
        )
    source = open_found(found, config.model)
    job = None
    if prompt is not None:
        _check_devices(shards)
        tried = config_for(config_path, [*overrides, f"mesh.tp={shards}"], checkpoint)
        job = sampler.Sampler(tried, sampler.Request(), checkpoint, [prompt])
    if output is not None:
        checkpoint = write_step(source, config.model, output, form=form, shards=shards, overwrite=overwrite)
    if job is not None:
        job.show(checkpoint)


def _check_shards_out(
    shards_out: int | None, overrides: Sequence[str], form: Form, prompt: str | None
) -> None:
    if shards_out is None:
        return
    if shards_out < 1:
        raise UserError(f"--shards-out {shards_out}: must be 1 or more")
    if is_set(overrides, "mesh", "tp"):
        raise UserError("--shards-out and --set mesh.tp say the same thing: leave one of them out")
    if form is Form.NATIVE and prompt is None:
        raise UserError(
            f"--shards-out {shards_out}: a native checkpoint has no shards: leave it out, or write --format classic"
        )


def _check_devices(shards: int) -> None:
    """Refuse a prompt that these devices cannot answer with `shards` of them for one copy of the model."""
    platforms.CompileCache()
    if jax.device_count() % shards:
        raise UserError(
            f"--prompt with {shards} shards needs a multiple of {shards} devices, found {jax.device_count()}: give "
            f"--shards-out 1, or leave --prompt out and try the result with device_sample.py --set mesh.tp=1"
        )
