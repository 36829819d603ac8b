"""Classic checkpoints to classic checkpoints: the work of slim_model.py and resharding_example.py."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from mesh_transformer import logs
from mesh_transformer.checkpoint.classic import open_classic
from mesh_transformer.checkpoint.classic_folder import write_meta
from mesh_transformer.checkpoint.classic_write import check_writable, write_classic
from mesh_transformer.checkpoint.target import check_free, new_folder
from mesh_transformer.config import load_config
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.files import join
from mesh_transformer.logs import log
from mesh_transformer.runtime import sampler


def slim(
    config_path: str, overrides: Sequence[str], *, step: int | None, f16: bool, overwrite: bool = False
) -> int:
    """Write the parameters of a full checkpoint, in half precision, to `{root}_slim/step_N` (or `_slim_f16`).

    Raises:
        UserError: there is no checkpoint of that step, or it does not fit the config, or the target is there.
    """
    config = load_config(config_path, overrides)
    logs.set_up()
    root = config.checkpoint.root.rstrip("/")
    source = open_classic(root, config.model, step)
    target = join(root + ("_slim_f16" if f16 else "_slim"), f"step_{source.counts.step}")
    dtype = np.dtype(np.float16 if f16 else ml_dtypes.bfloat16)
    log.info(
        "%s: %d shards, step %d, to %s in %s",
        source.where,
        source.form.shards,
        source.counts.step,
        target,
        dtype,
    )
    with new_folder(target, overwrite=overwrite, source=source.where) as folder:
        write_classic(source, config.model, folder, source.form.shards, full=False, dtype=dtype)
    write_meta(target, source.counts.step, source.extra.get("aux"))
    log.info("written: %s", target)
    return 0


def reshard(
    config_path: str,
    overrides: Sequence[str],
    *,
    checkpoint: str,
    shards_out: int,
    out: str | None,
    prompt: str | None,
    overwrite: bool = False,
) -> int:
    """Write a checkpoint in another number of shards to `out`, and print a completion of `prompt` with its weights.

    The model then runs on a mesh with mesh.tp `shards_out`, whatever the config says.

    Raises:
        UserError: neither is asked for, or the checkpoint does not fit the config or the shards, or `out` is there.
    """
    if out is None and prompt is None:
        raise UserError("nothing to do: give --out FOLDER, --prompt TEXT or both")
    overrides = [f"mesh.tp={shards_out}", *overrides]
    config = load_config(config_path, overrides)
    logs.set_up()
    source = open_classic(checkpoint, config.model)
    if prompt is not None:
        folder, _ = sampler.split_step(out or checkpoint)
        load_tokenizer(config.data.tokenizer, folder)  # what is wrong with it is told before the work
    if out is not None:
        check_writable(source, config.model, shards_out, full=source.form.full)
        check_free(out, overwrite=overwrite, source=source.where)
        kind = "full" if source.form.full else "slim"
        log.info("%s: %s, %d shards to %d", source.where, kind, source.form.shards, shards_out)
        with new_folder(out, overwrite=overwrite, source=source.where) as folder:
            write_classic(source, config.model, folder, shards_out)
        write_meta(out, source.counts.step, source.extra.get("aux"))
        log.info("written: %s", out)
    if prompt is None:
        return 0
    return sampler.run(
        config_path,
        overrides,
        sampler.Request(),
        checkpoint=out or checkpoint,
        prompt=prompt,
        prompt_tokens=None,
        as_json=False,
    )
