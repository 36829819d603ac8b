"""The config of a command: a file's, or the defaults with the model of the checkpoint that is named."""

from collections.abc import Sequence

from mesh_transformer.checkpoint.open import noted_config, recognise
from mesh_transformer.config import Config, load_config, parse_config
from mesh_transformer.errors import UserError


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
        raise UserError(
            "no model is named: give --config FILE, or --ckpt DIR, a checkpoint that knows its model; or both"
        )
    found = recognise(checkpoint)
    noted = noted_config(found)
    if noted is None:
        raise UserError(f"{found.folder} does not note its model: give the config of its run, --config FILE")
    return parse_config(noted, overrides)
