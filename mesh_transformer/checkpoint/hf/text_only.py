"""Hugging Face folders that hold a vision tower beside a text model: the text model alone."""

from collections import Counter
from typing import Any, TypeVar

from mesh_transformer.errors import UserError
from mesh_transformer.logs import log

T = TypeVar("T")

# how names of the text model begin, on the hub and in files of transformers 5; and how they begin in its own folder
_NAMES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
# keys that stand beside the text model's
_SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")


def text_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The config.json of the text model.

    Raises:
        UserError: the folder has no other model.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"{where} has no text_config: it holds one model, read it without --text-only")
    return {**{name: config[name] for name in _SHARED if name in config}, **text}


def text_tensors(stored: dict[str, T], where: str) -> dict[str, T]:
    """The tensors of the text model by the names of its own folder. A log line names the others."""
    found, others = {}, Counter[str]()
    for name, tensor in stored.items():
        prefix = next((prefix for prefix in _NAMES if name.startswith(prefix)), None)
        if prefix is not None:
            found[_NAMES[prefix] + name.removeprefix(prefix)] = tensor
        else:
            others[name.removeprefix("model.").partition(".")[0]] += 1
    left_out = ", ".join(f"{count} of {module}" for module, count in sorted(others.items()))
    log.info("%s: tensors that are left out: %s", where, left_out or "none")
    return found
