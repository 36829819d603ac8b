"""The sampling options that the authors of a Hugging Face model propose: generation_config.json in its folder."""

from typing import Any

from mesh_transformer.checkpoint.format import GENERATION_CONFIG
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.config.describe import short
from mesh_transformer.errors import UserError, options_to_add
from mesh_transformer.infer.requests import OPTIONS, SamplingOptions, all_if_negative
from mesh_transformer.logs import log

# those that vLLM reads too; do_sample is not read: a temperature of 0 is greedy
NAMES = ("temperature", "top_p", "top_k", "repetition_penalty")


def generation_defaults(checkpoint: Checkpoint, source: str) -> dict[str, Any]:
    """The options that a request need not name, by name, where they differ from `SamplingOptions`.

    Args:
        source: "auto": the model's file. "none": nothing is read.

    Raises:
        UserError: there is no checkpoint, or the file has a value that is not allowed.
    """
    if source == "none":
        return {}
    proposed = {name: checkpoint.generation_config.get(name) for name in NAMES}
    defaults = {}
    for name, value in proposed.items():
        if value is None:
            continue
        try:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number; got {short(value)}")
            if OPTIONS[name].dtype == "int32" and not float(value).is_integer():
                raise ValueError(f"{name} must be a whole number; got {value}")
            if name == "top_k":
                value = all_if_negative(value)
            options: dict[str, Any] = {name: value}
            SamplingOptions(**options)
        except ValueError as error:
            raise UserError(f"{checkpoint}: {GENERATION_CONFIG}: {error}; or give {_none()}") from error
        if value != OPTIONS[name].default:
            defaults[name] = value
    if defaults:
        listed = ", ".join(f"{name} {value}" for name, value in defaults.items())
        log.info("defaults of %s: %s (%s: those of this program)", GENERATION_CONFIG, listed, _none())
    return defaults


def _none() -> str:
    return options_to_add("--generation-config", "none")
