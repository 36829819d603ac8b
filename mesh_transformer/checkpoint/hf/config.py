"""Reads the config.json of a Hugging Face folder: its `model_type` selects the family."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mesh_transformer import files
from mesh_transformer.config import ModelConfig, strict_json
from mesh_transformer.config.describe import short
from mesh_transformer.environment import command
from mesh_transformer.errors import UserError, listed, options_to_add
from mesh_transformer.families import ALIASES, FAMILIES
from mesh_transformer.families.hf_keys import ConfigJson

_OTHER_HEADS = re.compile(r"For(\w*Classification|RewardModel\w*|QuestionAnswering|MultipleChoice)$")


def read_model(folder: str, *, text_only: bool = False) -> ModelConfig:
    """The architecture that a folder's config.json describes.

    Args:
        text_only: read the text model of a folder that holds a vision tower too.

    Raises:
        UserError: config.json is missing or unreadable, or describes an unsupported model.
    """
    return parse_model(read_config(folder, text_only=text_only), f"{folder}/config.json")


def read_config(folder: str, *, text_only: bool = False) -> dict[str, Any]:
    """A folder's config.json, or what it says about the text model.

    Raises:
        UserError: it is missing or unreadable, or has no text model besides others.
    """
    path = files.join(folder, "config.json")
    if not files.exists(path):
        raise UserError(f"{folder} is not a Hugging Face folder: it has no config.json")
    config = strict_json.read_object(path)
    if not text_only:
        return config
    # only a conversion needs it
    from mesh_transformer.checkpoint.hf.text_only import text_config

    return text_config(config, path)


def parse_model(config: dict[str, Any], where: str) -> ModelConfig:
    """The architecture that the content of a config.json describes.

    Raises:
        UserError: the model is not supported.
    """
    families = {family.HF_MODEL_TYPE: family for family in FAMILIES.values() if family.HF_MODEL_TYPE is not None}
    try:
        keys = ConfigJson(_in_names_of_the_family(config))
        model_type = keys.take("model_type", default=None)
        if not isinstance(model_type, str) or model_type not in families:
            known = [*families, *ALIASES]
            text = config.get("text_config")
            text_type = text.get("model_type") if isinstance(text, dict) else None
            instead = _neighbours(model_type, known) if text_type is None else _text_model(text_type, known)
            raise UserError(f"model_type is {model_type!r:.60}: {instead}")
        _check_head(config.get("architectures"))
        model = families[model_type].from_hf(keys)
        keys.refuse_rest()
    except ValidationError as error:
        raise UserError(f"{where}: {'; '.join(map(_reason, error.errors()))}") from error
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return model


def _in_names_of_the_family(config: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json, where `model_type` is another name of a family with the names of that family."""
    alias = ALIASES.get(str(config.get("model_type")))
    if alias is None:
        return config
    renamed: dict[str, Any] = {}
    for name, value in config.items():
        if name in alias.ignored:
            continue
        other = renamed.setdefault(alias.keys.get(name, name), value)
        if other != value:
            raise UserError(f"{name} {short(value)} contradicts {alias.keys.get(name, name)} {short(other)}")
    return {**alias.defaults, **renamed, "model_type": alias.family}


def _text_model(model_type: Any, known: Sequence[str]) -> str:
    """What can be read of a model that has a text model of this type besides others."""
    if model_type in known:
        return (
            f"this is the text model {model_type} beside a vision tower, which is not supported; "
            f"{command('from-hf')} {options_to_add('--text-only')} converts the text model alone"
        )
    return f"this is a text model of the type {model_type!r:.60} beside others, and {_neighbours(model_type, known)}"


def _neighbours(model_type: Any, known: Sequence[str]) -> str:
    """What can be read in place of an unknown type: the types with similar names, or all."""
    near = difflib.get_close_matches(model_type, known) if isinstance(model_type, str) else []
    if near:
        return f"this type cannot be read; near it are {listed(near)} (docs/families.md has all {len(known)})"
    return f"only {', '.join(known)} can be read"


def _check_head(architectures: Any) -> None:
    """Refuse a model whose head gives no tokens."""
    for name in architectures if isinstance(architectures, list) else []:
        if isinstance(name, str) and (match := _OTHER_HEADS.search(name)):
            raise UserError(
                f"architectures has {name!r:.80}: its head is for {_words(match[1])} and has no logits of tokens; give "
                "the model that it was made from"
            )


def _words(name: str) -> str:
    """SequenceClassification as `sequence classification`."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()


def _reason(detail: ErrorDetails) -> str:
    error = detail.get("ctx", {}).get("error")
    return str(error) if error else f"model.{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
