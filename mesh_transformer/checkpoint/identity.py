"""Checks that a checkpoint belongs to the config's model and optimizer, before any tensor is read.

Shapes do not identify a model: with a different number of heads, rotary dimensions or norm, tensors of the same shapes
give different results. A native step records the config of its run in the manifest, a classic step that this program
wrote records the model in `model.json`, and a Hugging Face folder in config.json.
"""

import functools
import json
from typing import Any

import jax

from mesh_transformer.checkpoint.tensors import TensorSource, slots
from mesh_transformer.config import LoraConfig, ModelConfig, OptimizerConfig, parse_config
from mesh_transformer.config.lora import with_adapters
from mesh_transformer.config.schema import VARIANTS
from mesh_transformer.errors import UserError, options_to_add, set_options
from mesh_transformer.families import FAMILIES
from mesh_transformer.logs import log
from mesh_transformer.optimizers import OPTIMIZERS


def with_model(extra: dict[str, Any], model: ModelConfig, tokenizer: str | None = None) -> dict[str, Any]:
    """`extra`, the JSON of a checkpoint, with the model's config as `extra["config"]["model"]`, and the name of the
    tokenizer as `extra["config"]["data"]["tokenizer"]`."""
    data = {} if tokenizer is None else {"data": {"tokenizer": tokenizer}}
    return {**extra, "config": {"model": model.model_dump(mode="json"), **data}}


def check_model(source: TensorSource, model: ModelConfig) -> None:
    """Refuse a checkpoint whose architecture differs from `model`.

    A checkpoint that records no model is accepted, with one warning per process.

    Raises:
        UserError: a field differs (the message names each), or the recorded model cannot be read.
    """
    recorded = recorded_model(source.extra.get("config"), source.where)
    if recorded is None:
        _warn_unrecorded(source.where)
    else:
        check_same_architecture(model, recorded, source.where)


def check_same_architecture(expected: ModelConfig, found: ModelConfig, where: str) -> None:
    """Refuse a checkpoint whose architecture, `found`, differs from the config's, `expected`.

    Raises:
        UserError: a field differs; the message names each.
    """
    ours, stored = expected.architecture(), found.architecture()
    wrong = [name for name in ours if name in stored and ours[name] != stored[name]]
    if not wrong:
        return
    differences = [f"model.{name}: the config has {ours[name]}, the checkpoint {stored[name]}" for name in wrong]
    # the context is no part of the architecture, and a run may have a shorter one
    context = ["--set", f"model.seq={expected.seq}"] if expected.seq < found.seq else []
    raise UserError(
        f"{where} does not match this config:",
        *(f"  {difference}" for difference in differences),
        f"{options_to_add('--ignore-keys', 'model', *context)} takes the checkpoint's model, if --set changes none of "
        "these; or choose another checkpoint or checkpoint.model_dir",
    )


def warn_of_longer_context(source: TensorSource, model: ModelConfig) -> None:
    """Log a warning if the context of `model` is longer than the one that a checkpoint's model was trained with.

    Without a recorded model the trained context is not known: no warning.

    Raises:
        UserError: the recorded model cannot be read.
    """
    recorded = recorded_model(source.extra.get("config"), source.where)
    if recorded is not None and model.seq > recorded.seq and _is_first_process():
        log.warning(
            "model.seq is %d, but %s was trained with a context of %d: what the model computes after position %d may "
            "be useless",
            model.seq,
            source.where,
            recorded.seq,
            recorded.seq,
        )


def check_lora(source: TensorSource, lora: LoraConfig, model: ModelConfig | None) -> None:
    """Refuse to resume a run with adapters as one without them, the reverse, and a run with other adapters.

    Args:
        model: of the run, in which two spellings may be the same targets. None: it is not known.

    Raises:
        UserError: the message names the field.
    """
    config = source.extra.get("config")
    group = config.get("lora") if isinstance(config, dict) else None
    try:
        recorded = LoraConfig(**group) if isinstance(group, dict) else LoraConfig()
    except ValueError as error:
        raise UserError(f"{source.where}: the group lora that it records cannot be read: {error}") from error
    for name in ("rank", "alpha", "targets"):
        ours, stored = (json.dumps(lora_value(group, name)) for group in (lora, recorded))
        if ours != stored and not (name == "targets" and model and _same_matrices(model, lora, recorded)):
            raise UserError(
                f"{source.where} is of a run with lora.{name} {stored}, and the config has {ours}: set it as at the "
                f"start of the run ({set_options(f'lora.{name}={stored}')}), or choose another checkpoint.model_dir"
            )


def _same_matrices(model: ModelConfig, *groups: LoraConfig) -> bool:
    decoder = model.decoder()
    forms = [with_adapters(decoder, lora.model_copy(update={"dropout": 0.0}), model).forms for lora in groups]
    return len(set(forms)) == 1


def lora_value(lora: LoraConfig, name: str) -> Any:
    """The value of a field; of an alpha that is not given, its default."""
    value = getattr(lora, name)
    return float(lora.rank) if name == "alpha" and value is None and lora.rank else value


def check_optimizer(source: TensorSource, optimizer: OptimizerConfig) -> None:
    """Refuse to resume from a checkpoint that lacks the state of the config's optimizer.

    Raises:
        UserError: the checkpoint has no optimizer state, or the state of another optimizer.
    """
    found, where = _optimizer(source), source.where
    if found is None and optimizer.slots:
        raise UserError(
            f"{where} has no {optimizer.name.capitalize()} moments, so a run cannot resume from it. Start from it with "
            f"--tune-model-path {where} and another checkpoint.model_dir"
        )
    if found not in (None, optimizer.name):
        raise UserError(
            f"{where} holds the state of optimizer {found}, the config has optimizer.name {optimizer.name}: set "
            f"optimizer.name={found}, or start from its parameters alone with "
            f"--tune-model-path {where} --fresh-opt and another checkpoint.model_dir"
        )


def _optimizer(source: TensorSource) -> str | None:
    """The optimizer whose state a checkpoint holds: the one that its config records, else the one with its slots."""
    stored, config = slots(source), source.extra.get("config")
    optimizer = config.get("optimizer") if isinstance(config, dict) else None
    if not stored:
        return None
    if isinstance(optimizer, dict) and optimizer.get("name") in tuple(OPTIMIZERS):
        return str(optimizer["name"])
    by_slots = (name for name, kind in OPTIMIZERS.items() if kind(name=name).slots.keys() == stored)
    return next(by_slots, ", ".join(sorted(stored)))


def recorded_model(config: Any, where: str) -> ModelConfig | None:
    """The model in `config`, the config that a checkpoint records; None if it records none.

    Raises:
        UserError: the recorded model cannot be read.
    """
    recorded = config.get("model") if isinstance(config, dict) else None
    if recorded is None:
        return None
    try:
        if not isinstance(recorded, dict):
            raise UserError("expected an object")
        family = FAMILIES.get(str(VARIANTS["model"].chosen(recorded)), ModelConfig)
        model = parse_config({"model": {k: recorded[k] for k in recorded if k in family.model_fields}}).model
        if unknown := [k for k in recorded if k not in family.model_fields]:
            raise UserError(f"this version has no {', '.join(sorted(unknown))}; a newer version may have written it")
        return model
    except UserError as error:
        raise UserError(f"{where}: the model that the checkpoint records cannot be read: {error}") from error


@functools.cache
def _warn_unrecorded(where: str) -> None:
    if _is_first_process():
        log.warning(
            "%s does not record its model: n_heads, pe_rotary_dims and norm are not checked against the config",
            where,
        )


def _is_first_process() -> bool:
    """Whether this is process 0, without a start of the backend where there is one process."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0
