"""adapter_config.json of PEFT.

Each key is read, or is harmless because it acts in training alone or is said by the tensors too, or is refused by name.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import regex

from mesh_transformer import files, hub
from mesh_transformer.config import strict_json
from mesh_transformer.errors import UserError

# values of keys that are off
_OFF: tuple[Any, ...] = (None, False, "", [], {}, "none")
_READ = frozenset({
    "peft_type", "task_type", "base_model_name_or_path", "revision", "lora_alpha", "alpha_pattern", "use_rslora",
    "init_lora_weights",
})  # fmt: skip
# the tensors have names, shapes and ranks; the others act in training, or beside an initialization that is refused
_HARMLESS = frozenset({
    "auto_mapping", "peft_version", "inference_mode", "r", "target_modules", "target_parameters", "exclude_modules",
    "lora_dropout", "fan_in_fan_out", "rank_pattern", "layers_to_transform", "layers_pattern", "megatron_core",
    "eva_config", "corda_config", "loftq_config", "lora_ga_config", "qalora_group_size", "runtime_config",
    "ensure_weight_tying", "unsloth_fixed",
})  # fmt: skip
_REASONS = {
    "use_dora": "DoRA has a magnitude beside each pair",
    "use_qalora": "QA-LoRA averages the inputs of a",
    "use_bdlora": "its matrices are block-diagonal in a form of their own",
    "lora_bias": "b has a bias",
    "bias": "it trains biases of the model too",
    "modules_to_save": "it has whole modules besides the pairs",
    "layer_replication": "its model has layers several times",
    "trainable_token_indices": "it changes the table of tokens",
    "alora_invocation_tokens": "it acts from a token on",
    "arrow_config": "it chooses among several adapters",
    "velora_config": "it is a variant of LoRA",
    "kasa_config": "it is a variant of LoRA",
    "monteclora_config": "it is a variant of LoRA",
    "megatron_config": "it is of Megatron's layers",
}
# those that leave the base as it is
_INITIAL_VALUES = (True, False, None, "gaussian", "orthogonal", "eva")
_MAX_PATTERNS = 20_000
_MAX_PATTERN_LENGTH = 500
_MAX_ALPHA = 1e9
# of a pattern and a name, seconds
_MATCH_S = 1.0


class AdapterConfig(NamedTuple):
    """What an adapter_config.json says.

    Args:
        base: `base_model_name_or_path`; None: it names no model.
        revision: of the base on the hub.
        alphas: by pattern of the names of modules.
    """

    where: str
    base: str | None
    revision: str | None
    alpha: float
    alphas: Mapping[str, float]
    root_of_rank: bool

    def scale(self, module: str, rank: int) -> float:
        """What multiplies the product of the pair of a module: alpha / rank, or alpha / sqrt(rank) (rsLoRA,
        Kalajdzievski 2023, arXiv:2312.03732).

        Raises:
            UserError: a pattern is no pattern, or takes too long.
        """
        alpha = next((alpha for pattern, alpha in self.alphas.items() if self._matches(pattern, module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.root_of_rank else rank)

    def _matches(self, pattern: str, module: str) -> bool:
        """As PEFT matches: the end of a name, from a dot on."""
        if module == pattern or module.endswith(f".{pattern}"):
            return True
        try:
            return regex.match(rf"(.*\.)?({pattern})$", module, timeout=_MATCH_S) is not None
        except (regex.error, TimeoutError, RecursionError) as error:
            raise UserError(f"{self.where}: alpha_pattern has {pattern!r:.80}, which is no usable pattern") from error


def read_adapter_config(folder: str) -> AdapterConfig:
    """Read the adapter_config.json of a folder, local or `gs://`.

    Raises:
        UserError: it cannot be read, or has a key that changes the adapters in a way that is not computed.
    """
    where = files.join(folder, hub.ADAPTER_CONFIG)
    raw = strict_json.read_object(where)
    _check_kind(raw, where)
    for key, value in raw.items():
        if key in _READ or key in _HARMLESS or value in _OFF:
            continue
        reason = _REASONS.get(key, "it is not a key of LoRA that is known")
        raise UserError(
            f"{where}: {key} is {value!r:.60}, which is not supported ({reason}): merge the adapter into its base with "
            "PEFT's merge_and_unload and save_pretrained, and give that folder"
        )
    initial = raw.get("init_lora_weights", True)
    if initial not in _INITIAL_VALUES:
        raise UserError(
            f"{where}: init_lora_weights is {initial!r:.60}, which changes the base too: save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion, or merge it with merge_and_unload"
        )
    alphas = raw.get("alpha_pattern") or {}
    if (
        not isinstance(alphas, dict)
        or len(alphas) > _MAX_PATTERNS
        or max(map(len, alphas), default=0) > (_MAX_PATTERN_LENGTH)
    ):
        raise UserError(
            f"{where}: alpha_pattern must be an object of at most {_MAX_PATTERNS} patterns of {_MAX_PATTERN_LENGTH} "
            "characters"
        )
    root_of_rank = raw.get("use_rslora") or False
    if not isinstance(root_of_rank, bool):
        raise UserError(f"{where}: use_rslora is {root_of_rank!r:.60}: expected true or false")
    return AdapterConfig(
        where,
        _text(raw, "base_model_name_or_path", where),
        _text(raw, "revision", where),
        _number(raw.get("lora_alpha", 8), "lora_alpha", where),
        {pattern: _number(alpha, f"alpha_pattern of {pattern!r:.80}", where) for pattern, alpha in alphas.items()},
        root_of_rank,
    )


def _check_kind(raw: Mapping[str, Any], where: str) -> None:
    kind, task = raw.get("peft_type"), raw.get("task_type")
    if kind != "LORA":
        raise UserError(f"{where}: peft_type is {kind!r:.60}: only LORA is read")
    if task not in (None, "CAUSAL_LM"):
        raise UserError(f"{where}: task_type is {task!r:.60}: only CAUSAL_LM, or none, is read")


def _text(raw: Mapping[str, Any], key: str, where: str) -> str | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: {key} is {value!r:.60}: expected a text")
    return value or None


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MAX_ALPHA:
        raise UserError(f"{where}: {key} is {value!r:.60}: expected a number")
    return float(value)
