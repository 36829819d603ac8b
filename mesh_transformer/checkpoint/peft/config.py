"""adapter_config.json of PEFT.

Each key is read, or is harmless because it acts in training alone or is said by the tensors too, or is refused by name.
"""

import functools
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from mesh_transformer import files, hub
from mesh_transformer.config import strict_json
from mesh_transformer.errors import UserError

# values of keys that are off
_OFF: tuple[Any, ...] = (None, False, "", [], {}, "none")
_READ = frozenset({
    "peft_type", "task_type", "base_model_name_or_path", "revision", "lora_alpha", "alpha_pattern", "use_rslora",
    "init_lora_weights", "target_parameters",
})  # fmt: skip
# the tensors have names, shapes and ranks; the others act in training, or beside an initialization that is refused
_HARMLESS = frozenset({
    "auto_mapping", "peft_version", "inference_mode", "r", "target_modules", "exclude_modules",
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
_MAX_PATTERNS, _MAX_TEXT, _MAX_ALPHA = 1_000, 500, 1e9
# for the patterns of a folder together
_MATCHES_S = 10.0
_PLAIN = re.compile(r"\w+(\.\w+)*")


@dataclass
class AdapterConfig:
    """What an adapter_config.json says.

    Args:
        where: its path.
        base: `base_model_name_or_path`; None: it names no model.
        revision: of the base on the hub.
        alphas: by pattern of the names of modules and parameters.
        root_of_rank: alpha is over the root of the rank.
        parameters: the ends of the names of parameters that are adapted, not modules.
    """

    where: str
    base: str | None
    revision: str | None
    alpha: float
    alphas: Mapping[str, float]
    root_of_rank: bool
    parameters: tuple[str, ...]
    # for all patterns and names
    seconds_left: float = field(default_factory=lambda: _MATCHES_S)

    def scale(self, name: str, rank: int) -> float:
        """What multiplies the product of the pair of a module or a parameter: alpha / rank, or alpha / sqrt(rank)
        (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732).

        Raises:
            UserError: a pattern takes too long.
        """
        return self._alpha(name) / (math.sqrt(rank) if self.root_of_rank else rank)

    def of_parameter(self, module: str) -> str:
        """The name by which PEFT looks for the alpha of a module with one weight: of the weight, if it is adapted as a
        parameter."""
        weight = f"{module}.weight"
        return weight if any(f".{weight}".endswith(f".{name}") for name in self.parameters) else module

    def _alpha(self, name: str) -> float:
        """The alpha of the first pattern that matches the end of a name, from a dot on, as in PEFT."""
        ends = [name, *(name[at + 1 :] for at, letter in enumerate(name) if letter == ".")]
        first = min((self._plain[end] for end in ends if end in self._plain), default=None)
        for number, pattern in self._patterns:
            if first is not None and number > first:
                break
            if self._matches(pattern, name):
                return self._values[number]
        return self.alpha if first is None else self._values[first]

    @functools.cached_property
    def _values(self) -> list[float]:
        return list(self.alphas.values())

    @functools.cached_property
    def _plain(self) -> dict[str, int]:
        """The numbers of patterns that are names, as EVA writes one for each module. Their dots match dots alone, since
        no two modules differ in that."""
        return {pattern: at for at, pattern in enumerate(self.alphas) if _PLAIN.fullmatch(pattern)}

    @functools.cached_property
    def _patterns(self) -> list[tuple[int, Any]]:
        return [
            (at, _compiled(pattern, self.where)) for at, pattern in enumerate(self.alphas) if pattern not in self._plain
        ]

    def _matches(self, pattern: Any, name: str) -> bool:
        began = time.monotonic()
        try:
            return pattern.match(name, timeout=max(self.seconds_left, 1e-3)) is not None
        except (TimeoutError, MemoryError, RecursionError) as error:
            raise UserError(
                f"{self.where}: alpha_pattern takes over {_MATCHES_S:g} seconds to match: give the names of modules"
            ) from error
        finally:
            self.seconds_left -= time.monotonic() - began


def read_adapter_config(folder: str) -> AdapterConfig:
    """Read the adapter_config.json of a folder, local or `gs://`.

    Raises:
        UserError: it cannot be read, or has a key that changes the adapters in a way that is not computed.
    """
    where = files.join(folder, hub.ADAPTER_CONFIG)
    raw = strict_json.read_object(where)
    _check_kind(raw, where)
    for key, value in raw.items():
        # a key that nobody knows may be on where it is false
        if key in _READ or key in _HARMLESS or value is None or (key in _REASONS and value in _OFF):
            continue
        reason = _REASONS.get(key, "it is not a key of LoRA that is known")
        raise UserError(
            f"{where}: {key} is {value!r:.60}, which is not supported ({reason}): merge the adapter into its base with "
            "PEFT's merge_and_unload and save_pretrained, and give that folder"
        )
    initial = raw.get("init_lora_weights", True)
    if initial not in _INITIAL_VALUES:
        raise UserError(
            f"{where}: init_lora_weights is {initial!r:.60}, which may change the base too: save the adapter with "
            "PEFT's path_initial_model_for_weight_conversion, or merge it with merge_and_unload"
        )
    alphas = raw.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or max(map(len, alphas), default=0) > _MAX_TEXT:
        raise UserError(f"{where}: alpha_pattern must be an object of patterns of at most {_MAX_TEXT} characters")
    if sum(_PLAIN.fullmatch(pattern) is None for pattern in alphas) > _MAX_PATTERNS:
        raise UserError(f"{where}: alpha_pattern has over {_MAX_PATTERNS} patterns that are not names of modules")
    parameters = raw.get("target_parameters") or ()
    if not isinstance(parameters, list | tuple) or not all(isinstance(name, str) for name in parameters):
        raise UserError(f"{where}: target_parameters is {parameters!r:.60}: expected a list of names")
    if len(parameters) > _MAX_PATTERNS:
        raise UserError(f"{where}: target_parameters has {len(parameters)} names, at most {_MAX_PATTERNS} are read")
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
        tuple(parameters),
    )


def _check_kind(raw: Mapping[str, Any], where: str) -> None:
    kind, task = raw.get("peft_type"), raw.get("task_type")
    if kind != "LORA":
        raise UserError(f"{where}: peft_type is {kind!r:.60}: only LORA is read")
    if task not in (None, "CAUSAL_LM"):
        raise UserError(f"{where}: task_type is {task!r:.60}: only CAUSAL_LM, or none, is read")


def _text(raw: Mapping[str, Any], key: str, where: str) -> str | None:
    value = raw.get(key)
    if value is not None and not (isinstance(value, str) and len(value) <= _MAX_TEXT and value.isprintable()):
        raise UserError(f"{where}: {key} is {value!r:.60}: expected a text of at most {_MAX_TEXT} characters")
    return value or None


def _compiled(pattern: str, where: str) -> Any:
    """A pattern as PEFT uses it, for `regex`, which has time limits, and further syntax."""
    try:
        re.compile(pattern)
        return regex.compile(rf"(.*\.)?({pattern})$")
    except (re.error, regex.error, MemoryError, OverflowError, RecursionError) as error:
        raise UserError(f"{where}: alpha_pattern has {pattern!r:.80}, which is no usable pattern") from error


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MAX_ALPHA:
        raise UserError(f"{where}: {key} is {value!r:.60}: expected a number")
    return float(value)
