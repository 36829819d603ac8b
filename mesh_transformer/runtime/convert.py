"""Checkpoints of any form to native, classic and Hugging Face ones: the work of the four commands that convert."""

import logging
import posixpath
import re
from collections.abc import Sequence

import jax
import ml_dtypes
import numpy as np

from mesh_transformer import files, logs, platforms
from mesh_transformer.checkpoint.classic.folder import check_shards, write_config, write_meta
from mesh_transformer.checkpoint.classic.writer import write_classic
from mesh_transformer.checkpoint.hf.source import HFSource
from mesh_transformer.checkpoint.hf.writer import n_bytes, stored_dtype, write_hf
from mesh_transformer.checkpoint.identity import with_model
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.open import Format, check_only_step, find_checkpoint, open_folder, open_step
from mesh_transformer.checkpoint.target import check_free, new_folder
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig, is_set
from mesh_transformer.data.tokenizer import load_tokenizer, save_tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.logs import Transfer
from mesh_transformer.runtime.sampling import sampler
from mesh_transformer.runtime.session.weights import config_for, explain_damage, split_step

DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def to_hf(
    config_path: str | None,
    overrides: Sequence[str],
    checkpoint: str,
    output: str,
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
    debug: bool = False,
) -> None:
    """Write a checkpoint of any form as a Hugging Face folder.

    Args:
        config_path: None: the checkpoint knows its model.
        dtype: one of DTYPES; None: float16, as the original program, and from a Hugging Face folder as stored.
        tokenizer: a folder or a name on the hub, copied beside the weights.
        debug: log every tensor.

    Raises:
        UserError: an argument, the config or the checkpoint cannot be used; `output` is as it was.
    """
    logs.set_up(logging.DEBUG if debug else logging.INFO)
    model = config_for(config_path, overrides, checkpoint).model
    model.to_hf()  # refuses what transformers does not compute
    check_free(output, overwrite=overwrite, source=checkpoint)
    found = find_checkpoint(checkpoint)
    source = open_folder(found, model)
    kind = np.dtype(DTYPES[dtype]) if dtype else _default_dtype(found.format, source)
    end_of_text = _end_of_text(tokenizer, model) if tokenizer else None
    with (
        explain_damage(source),
        new_folder(output, overwrite=overwrite, source=source.where) as folder,
        Transfer("writing safetensors", n_bytes(model, kind)) as transfer,
    ):
        write_hf(source, model, folder, dtype=kind, end_of_text=end_of_text, progress=transfer.add)
        if tokenizer:
            save_tokenizer(tokenizer, folder)
    logs.log.info("%s: %s, from %s", output, kind, source.where)


def _default_dtype(format: Format, source: TensorSource) -> np.dtype:
    kind = stored_dtype(source) if format is Format.HUGGING_FACE else np.dtype(np.float16)
    why = "as stored" if format is Format.HUGGING_FACE else f"the default for a {format.value} checkpoint"
    logs.log.info("the weights are written in %s, %s; --dtype chooses another", kind, why)
    return kind


def from_hf(
    folder: str, output: str, *, format: Format | str, shards: int | None = None, overwrite: bool = False
) -> None:
    """Write a Hugging Face folder, of whatever architecture it says, in one of our two forms: see `write_step`.

    Raises:
        UserError: an argument or the folder cannot be used; `output` is as it was.
    """
    logs.set_up()
    source = HFSource(folder)
    logs.log.info("%s: %s", folder, source.model.model_dump(exclude_defaults=True))
    write_step(source, source.model, output, format=Format(format), shards=shards or 1, overwrite=overwrite)


def write_step(
    source: TensorSource,
    model: ModelConfig,
    output: str,
    *,
    format: Format,
    shards: int = 1,
    full: bool | None = None,
    dtype: np.dtype | None = None,
    overwrite: bool = False,
) -> str:
    """Write an open checkpoint as a step, native or classic; returns its folder.

    Args:
        output: native: the root, in which step_N is made; classic: the step folder itself.
        shards, full, dtype: of a classic one, as for `write_classic`.

    Raises:
        UserError: before anything is written: `output`, the model or the shards cannot be. Later: `source` is damaged.
            `output` is as it was.
    """
    check_output(output, format, source.counts.step)
    with explain_damage(source):
        if format is Format.NATIVE:
            output = write_native(source, output, model=model, overwrite=overwrite)
        else:
            with new_folder(output, overwrite=overwrite, source=source.where) as folder:
                write_classic(source, model, folder, shards, full=full, dtype=dtype)
                write_config(folder, with_model({}, model)["config"])
            write_meta(output, source.counts.step, source.extra.get("aux"))
    logs.log.info("%s: written from %s", output, source.where)
    return output


def check_output(output: str, format: Format, step: int) -> None:
    """Refuse a root where a step folder is meant, the other way round, and a native root with other steps.

    Raises:
        UserError: the message names the path that is meant, or the other steps.
    """
    path = output.rstrip("/")
    root, name = posixpath.split(path)
    is_step = re.fullmatch(r"step_\d+", name)
    if format is Format.NATIVE and is_step:
        raise UserError(
            f"{path}: for a native checkpoint name the root, {root or '.'}; step_{step} is made in it"
        )
    if format is Format.NATIVE:
        check_only_step(path, step)
    if format is Format.CLASSIC and is_step and name != f"step_{step}":
        raise UserError(f"{path} is named like another step: this is step {step}, name it step_{step}")


def _end_of_text(tokenizer: str, model: ModelConfig) -> int:
    """The tokenizer's end of a text, once it is sure that the model knows all its tokens."""
    if tokenizer == "bytes":
        raise UserError("--tokenizer bytes has no files that could be copied: leave it out")
    loaded = load_tokenizer(tokenizer)
    if loaded.n_vocab > model.n_vocab:
        raise UserError(
            f"--tokenizer {tokenizer} has {loaded.n_vocab} tokens, the model {model.n_vocab}: it is another model's"
        )
    return loaded.eot


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
        files.join(root + ("_slim_f16" if f16 else "_slim"), f"step_{source.counts.step}"),
        format=Format.CLASSIC,
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
    format: Format | str,
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
    format = Format(format)
    if output is None and prompt is None:
        raise UserError("nothing to do: give --out FOLDER, --prompt TEXT or both")
    logs.set_up()
    config = config_for(config_path, overrides, checkpoint)
    _check_shards(shards_out, overrides, format, prompt)
    shards = config.mesh.tp if shards_out is None else shards_out
    if output is not None and format is Format.CLASSIC:
        check_shards(config.model, shards, output)
    found = find_checkpoint(checkpoint)
    if output is not None and format is Format.NATIVE and found.format is Format.NATIVE:
        raise UserError(f"{found.path} is native already, for any number of devices: copy the folder")
    source = open_folder(found, config.model)
    job = None
    if prompt is not None:
        platforms.CompileCache()
        if jax.device_count() % shards:
            raise UserError(
                f"--prompt with {shards} shards needs a multiple of {shards} devices, found {jax.device_count()}: give "
                f"--shards-out 1, or leave --prompt out and try the result with device_sample.py --set mesh.tp=1"
            )
        tried = config_for(config_path, [*overrides, f"mesh.tp={shards}"], checkpoint)
        job = sampler.Sampler(tried, sampler.SampleRequest(), checkpoint, [prompt])
    if output is not None:
        checkpoint = write_step(
            source, config.model, output, format=format, shards=shards, overwrite=overwrite
        )
    if job is not None:
        job.show(checkpoint)


def _check_shards(
    shards_out: int | None, overrides: Sequence[str], format: Format, prompt: str | None
) -> None:
    if shards_out is None:
        return
    if shards_out < 1:
        raise UserError(f"--shards-out {shards_out}: must be 1 or more")
    if is_set(overrides, "mesh", "tp"):
        raise UserError("--shards-out and --set mesh.tp say the same thing: leave one of them out")
    if format is Format.NATIVE and prompt is None:
        raise UserError(
            f"--shards-out {shards_out}: a native checkpoint has no shards: leave it out, or write --format classic"
        )
