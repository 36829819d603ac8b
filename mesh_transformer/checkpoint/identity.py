"""Which model and optimizer a checkpoint is of. Its config lies beside the tensors, and is compared before any of them is read.

Shapes do not tell a model: with other heads, rotary dims or norms the same tensors give other numbers. A native step holds
the config of its run in the manifest, a classic step that we wrote in `model.json`, a Hugging Face folder in config.json.
"""

import functools
from typing import Any

import jax

from mesh_transformer.checkpoint.tensors import TensorSource, slots
from mesh_transformer.config import ModelConfig, OptimizerConfig, parse_config
from mesh_transformer.config.names import MOVED
from mesh_transformer.config.schema import VARIANTS
from mesh_transformer.errors import UserError
from mesh_transformer.families import FAMILIES
from mesh_transformer.logs import log
from mesh_transformer.optimizers import OPTIMIZERS


def with_model(extra: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The JSON beside a checkpoint's tensors, with the model's config in it: `extra["config"]["model"]`."""
    return {**extra, "config": {"model": model.model_dump(mode="json")}}


def check_model(source: TensorSource, asked: ModelConfig) -> None:
    """Refuse a checkpoint of another architecture than the config's. A checkpoint without a noted model gives one warning a process.

    Raises:
        UserError: names every field that differs, or the model that is noted cannot be read.
    """
    noted = recorded_model(source.extra.get("config"), source.where)
    if noted is None:
        _warn_unrecorded(source.where)
    else:
        check_same_architecture(asked, noted, source.where)


def check_same_architecture(asked: ModelConfig, found: ModelConfig, where: str) -> None:
    """Refuse one of two architectures that are not the same.

    Raises:
        UserError: names every field that differs.
    """
    ours, theirs = asked.architecture(), found.architecture()
    wrong = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    if not wrong:
        return
    differences = [
        f"model.{name}: the config has {ours[name]}, the checkpoint {theirs[name]}" for name in wrong
    ]
    sets = " ".join(f"--set model.{name}={theirs[name]}" for name in wrong)
    raise UserError(
        f"{where} does not fit this configuration:\n  "
        + "\n  ".join(differences)
        + f"\nset the model as the checkpoint has it ({sets}), or name another checkpoint or model_dir"
    )


def check_optimizer(source: TensorSource, asked: OptimizerConfig) -> None:
    """Refuse to go on from a checkpoint without the state of the config's optimizer.

    Raises:
        UserError: it has none, or that of another one.
    """
    found, where = _optimizer(source), source.where
    if found is None and asked.slots:
        raise UserError(
            f"{where} has no {asked.name.capitalize()} moments: no run can go on from it. Start from it with "
            f"--tune-model-path {where} and another checkpoint.model_dir"
        )
    if found not in (None, asked.name):
        raise UserError(
            f"{where} holds the state of optimizer {found}, the config has optimizer.name {asked.name}: set "
            f"optimizer.name={found}, or start from its parameters alone with --tune-model-path {where} --fresh-opt and "
            f"another checkpoint.model_dir"
        )


def _optimizer(source: TensorSource) -> str | None:
    """The optimizer whose state a checkpoint holds: as its config notes, else as the slots tell."""
    held, noted = slots(source), source.extra.get("config")
    optimizer = noted.get("optimizer") if isinstance(noted, dict) else None
    if not held:
        return None
    if isinstance(optimizer, dict) and optimizer.get("name") in tuple(OPTIMIZERS):
        return str(optimizer["name"])
    by_slots = (name for name, kind in OPTIMIZERS.items() if kind(name=name).slots.keys() == held)
    return next(by_slots, ", ".join(sorted(held)))


def recorded_model(config: Any, where: str) -> ModelConfig | None:
    """The model in the config that a checkpoint notes; None if it notes none.

    Raises:
        UserError: it cannot be read.
    """
    noted = config.get("model") if isinstance(config, dict) else None
    if noted is None:
        return None
    try:
        if not isinstance(noted, dict):
            raise UserError("expected an object")
        family = FAMILIES.get(str(VARIANTS["model"].chosen(noted)), ModelConfig)
        model = parse_config({"model": {k: noted[k] for k in noted if k in family.model_fields}}).model
        # an older version had fields of today's group compute here
        if unknown := [k for k in noted if k not in family.model_fields and ("model", k) not in MOVED]:
            raise UserError(
                f"this version has no {', '.join(sorted(unknown))}; a newer one may have written it"
            )
        return model
    except UserError as error:
        raise UserError(f"{where}: the model that the checkpoint notes cannot be read: {error}") from error


@functools.cache
def _warn_unrecorded(where: str) -> None:
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        log.warning(
            "%s does not note its model: n_heads, pe_rotary_dims and norm could not be compared with the config",
            where,
        )
