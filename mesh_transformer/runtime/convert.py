"""Checkpoints of any form to native, classic and Hugging Face ones."""

import logging
import posixpath
import re
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from mesh_transformer import logs
from mesh_transformer.checkpoint.classic_folder import write_config, write_meta
from mesh_transformer.checkpoint.classic_write import write_classic
from mesh_transformer.checkpoint.hf import HFSource
from mesh_transformer.checkpoint.hf_write import n_bytes, stored_dtype, write_hf
from mesh_transformer.checkpoint.identity import with_model
from mesh_transformer.checkpoint.native_writer import write_native
from mesh_transformer.checkpoint.open import Form, open_found, recognise
from mesh_transformer.checkpoint.target import check_free, new_folder
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig
from mesh_transformer.data.tokenizer import load_tokenizer, save_tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.logs import Transfer
from mesh_transformer.runtime.configs import config_for
from mesh_transformer.runtime.weights import damage_named

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
    found = recognise(checkpoint)
    source = open_found(found, model)
    kind = np.dtype(DTYPES[dtype]) if dtype else _default_dtype(found.form, source)
    end_of_text = _end_of_text(tokenizer, model) if tokenizer else None
    with (
        damage_named(source),
        new_folder(output, overwrite=overwrite, source=source.where) as folder,
        Transfer("writing safetensors", n_bytes(model, kind)) as transfer,
    ):
        write_hf(source, model, folder, dtype=kind, end_of_text=end_of_text, progress=transfer.add)
        if tokenizer:
            save_tokenizer(tokenizer, folder)
    logs.log.info("%s: %s, from %s", output, kind, source.where)


def _default_dtype(form: Form, source: TensorSource) -> np.dtype:
    kind = stored_dtype(source) if form is Form.HUGGING_FACE else np.dtype(np.float16)
    why = "as stored" if form is Form.HUGGING_FACE else f"the default for a {form.value} checkpoint"
    logs.log.info("the weights are written in %s, %s; --dtype chooses another", kind, why)
    return kind


def from_hf(
    folder: str, output: str, *, form: Form | str, shards: int | None = None, overwrite: bool = False
) -> None:
    """Write a Hugging Face folder, of whatever architecture it says, in one of our two forms: see `write_step`.

    Raises:
        UserError: an argument or the folder cannot be used; `output` is as it was.
    """
    logs.set_up()
    source = HFSource(folder)
    logs.log.info("%s: %s", folder, source.model.model_dump(exclude_defaults=True))
    write_step(source, source.model, output, form=Form(form), shards=shards or 1, overwrite=overwrite)


def write_step(
    source: TensorSource,
    model: ModelConfig,
    output: str,
    *,
    form: Form,
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
    check_output(output, form, source.counts.step)
    with damage_named(source):
        if form is Form.NATIVE:
            output = write_native(source, output, model=model, overwrite=overwrite)
        else:
            with new_folder(output, overwrite=overwrite, source=source.where) as folder:
                write_classic(source, model, folder, shards, full=full, dtype=dtype)
                write_config(folder, with_model({}, model)["config"])
            write_meta(output, source.counts.step, source.extra.get("aux"))
    logs.log.info("%s: written from %s", output, source.where)
    return output


def check_output(output: str, form: Form, step: int) -> None:
    """Refuse a root where a step folder is meant, and the other way round.

    Raises:
        UserError: names the path that is meant.
    """
    path = output.rstrip("/")
    root, name = posixpath.split(path)
    is_step = re.fullmatch(r"step_\d+", name)
    if form is Form.NATIVE and is_step:
        raise UserError(
            f"{path} is named like a step: for a native checkpoint name the root, {root or '.'}; "
            f"step_{step} is made in it"
        )
    if form is Form.CLASSIC and is_step and name != f"step_{step}":
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
