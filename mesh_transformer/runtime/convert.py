"""Converting checkpoints to and from the Hugging Face form."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from mesh_transformer import logs
from mesh_transformer.checkpoint.classic_folder import write_meta
from mesh_transformer.checkpoint.classic_write import check_writable, write_classic
from mesh_transformer.checkpoint.hf import HFSource
from mesh_transformer.checkpoint.hf_layout import check_exports
from mesh_transformer.checkpoint.hf_write import n_bytes, stored_dtype, write_hf
from mesh_transformer.checkpoint.manifest import DamagedCheckpoint
from mesh_transformer.checkpoint.native_writer import write_native
from mesh_transformer.checkpoint.open import open_source
from mesh_transformer.checkpoint.target import Transfer, check_free, new_folder
from mesh_transformer.config import ModelConfig, load_config
from mesh_transformer.data.tokenizer import load_tokenizer, save_tokenizer
from mesh_transformer.errors import UserError

DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def to_hf(
    config_path: str,
    overrides: list[str],
    checkpoint: str,
    output: str,
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint of any form as a Hugging Face folder.

    Args:
        dtype: one of DTYPES; None: as stored.
        tokenizer: a folder or a name on the hub, copied beside the weights.

    Raises:
        UserError: an argument, the config or the checkpoint cannot be used; `output` is as it was.
    """
    logs.set_up()
    model = load_config(config_path, overrides).model
    check_exports(model)
    check_free(output, overwrite=overwrite, source=checkpoint)
    source = open_source(checkpoint, model)
    kind = np.dtype(DTYPES[dtype]) if dtype else stored_dtype(source)
    end_of_text = _end_of_text(tokenizer, model) if tokenizer else None
    try:
        with (
            new_folder(output, overwrite=overwrite, source=source.where) as folder,
            Transfer("writing safetensors", n_bytes(model, kind)) as transfer,
        ):
            write_hf(source, model, folder, dtype=kind, end_of_text=end_of_text, progress=transfer.add)
            if tokenizer:
                save_tokenizer(tokenizer, folder)
    except DamagedCheckpoint as damage:
        raise UserError(f"{checkpoint} is damaged: {damage}") from damage
    logs.log.info("%s: %s, from %s", output, kind, source.where)


def from_hf(folder: str, output: str, *, form: str, shards: int = 1, overwrite: bool = False) -> None:
    """Write a Hugging Face folder as a native checkpoint (`output` is its root) or a classic step folder.

    Args:
        form: "native" or "classic".
        shards: of a classic one.

    Raises:
        UserError: an argument or the folder cannot be used; `output` is as it was.
    """
    logs.set_up()
    if form == "classic":
        check_free(output, overwrite=overwrite, source=folder)
    source = HFSource(folder)
    logs.log.info("%s: %s", folder, source.model.model_dump(exclude_defaults=True))
    try:
        if form == "native":
            output = write_native(source, output, overwrite=overwrite)
        else:
            check_writable(source, source.model, shards, full=False)
            with new_folder(output, overwrite=overwrite, source=folder) as temporary:
                write_classic(source, source.model, temporary, shards)
            write_meta(output, source.counts.step)
    except DamagedCheckpoint as damage:
        raise UserError(f"{folder} is damaged: {damage}") from damage
    logs.log.info("%s: from %s", output, folder)


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
