"""The config of a training command, whose file may leave the model to a checkpoint."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mesh_transformer.config import CheckpointConfig, Config, load_config, parse_config
from mesh_transformer.errors import UserError


def training_config(
    given: str | Mapping[str, Any],
    overrides: Sequence[str],
    tune_model_path: str | None,
    adapter: str | None = None,
    *,
    new: bool = False,
) -> Config:
    """The config in the file `given`, or with these values, with the `overrides`.

    If it has no group `model`, the model is that of the newest checkpoint of the run, or else of the checkpoint
    at `tune_model_path`. Without lora.rank, the group lora is that of the adapters at `adapter`.

    Args:
        new: the run starts anew, whatever checkpoints it has.

    Raises:
        UserError: the config is invalid, or the checkpoint cannot be read or does not record its model.
    """

    def find_model(settings: CheckpointConfig) -> dict[str, Any] | None:
        # a driver whose config has the model needs no jax
        from mesh_transformer.checkpoint.open import Checkpoint
        from mesh_transformer.runtime.session.weights import recorded_model_of, start_checkpoint

        tuned = None if tune_model_path is None else Checkpoint.open(tune_model_path)
        checkpoint = tuned if new else start_checkpoint(settings.root, tuned)
        return None if checkpoint is None else recorded_model_of(checkpoint)

    def load(overrides: Sequence[str]) -> Config:
        if isinstance(given, str):
            return load_config(given, overrides, find_model)
        return parse_config(dict(given), overrides, find_model)

    if adapter is None:
        return load(overrides)
    try:
        config = load(overrides)
    except UserError:
        # a field of the group lora may stand without its rank; any other error comes again
        config = load([*overrides, "lora.rank=1"])
    else:
        if config.lora.rank is not None:
            return config
    from mesh_transformer.runtime.session.weights import start_checkpoint
    from mesh_transformer.runtime.training.start_adapters import settings_of

    step = None if new else start_checkpoint(config.checkpoint.root, None)
    # a run that goes on needs no other adapters, which may be gone
    recorded = {} if step is None else step.recorded_group("lora")
    settings = [f"lora.{name}={json.dumps(value)}" for name, value in recorded.items() if value is not None]
    # what the user gives comes last
    return load([*(settings or settings_of(adapter, config.model)), *overrides])
