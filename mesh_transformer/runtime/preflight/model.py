"""The config that preflight judges for a model of others: `preflight --model`."""

import os
from collections.abc import Sequence
from typing import Any

from mesh_transformer.checkpoint.hf.config import parse_model
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.config import Config, ModelConfig, parse_config, strict_json
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log

SEQ = 2048
# of a step, as trainings of models of this size have
TOKENS = 1 << 19


def config_of(model: str, seq: int | None, batch: int | None, overrides: Sequence[str]) -> Config:
    """A config of training, or of serving, the model at a path. No weights are read. Logs what it assumes.

    Args:
        model: a checkpoint, a name on the hub, a config.json, or a folder with one.
        seq: tokens of a sequence, and the context of a server; None: SEQ, or the model's if that is shorter.
        batch: sequences of a step; None: some TOKENS tokens.
        overrides: as in `load_config`; they come after the other values.

    Raises:
        UserError: there is no such model, or a value is not possible.
    """
    for option, value in {"--seq": seq, "--batch": batch}.items():
        if value is not None and value < 1:
            raise UserError(f"{option} {value}: expected a whole number, 1 or more")
    described = _model(model)
    longest = min(SEQ, described.seq) if seq is None else seq
    if longest > described.seq:
        log.warning("--seq %d is longer than the context of the model, %d", longest, described.seq)
    sequences = max(1, TOKENS // longest) if batch is None else batch
    raw: dict[str, Any] = {
        "model": {**described.model_dump(exclude_none=True), "seq": longest},
        "data": {"seq": longest, "batch_size": sequences},
    }
    config = parse_config(raw, overrides)
    log.info(
        "assumed for %s: %s, a step of %d sequences of %d tokens, a context of %d; --seq, --batch and --set change it",
        *(model, config.optimizer.name, sequences, config.seq, config.model.seq),
    )
    return config


def _model(path: str) -> ModelConfig:
    folder = os.path.join(path, "config.json")
    file = next((file for file in (path, folder) if file.endswith(".json") and os.path.isfile(file)), None)
    if file is not None:
        return parse_model(strict_json.read_object(file), file)
    checkpoint = Checkpoint.open(path)
    if checkpoint.model is None:
        raise UserError(f"{path} does not record its model: give --config with the group model")
    return checkpoint.model
