"""GPT-Neo (Black et al. 2021): GPT-2 with sliding windows and products that are not scaled."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from mesh_transformer.errors import UserError
from mesh_transformer.families.gpt2 import Gpt2Like
from mesh_transformer.families.hf_keys import ConfigJson, Hf, JsonObject
from mesh_transformer.families.rows import matrix_rows
from mesh_transformer.fields import MOST_LAYERS, Tokens
from mesh_transformer.spec import TRANSPOSED, AttentionSpec, Tensor

_TYPES = ("global", "local")


class GptNeoConfig(Gpt2Like):
    """GPT-Neo: GPT-2 with a window in every second layer, no scale of queries and keys, and no biases on them."""

    HF_MODEL_TYPE: ClassVar = "gpt_neo"
    HF_ARCHITECTURE: ClassVar = "GPTNeoForCausalLM"
    HF_BUFFERS: ClassVar = r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)"
    HF_DEFAULTS: ClassVar = {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "vocab_size": 50257}
    HF_ROWS: ClassVar = {
        "layers": Hf("num_layers", "num_hidden_layers", most=MOST_LAYERS),
        "n_heads": Hf("num_heads", "num_attention_heads"),
    }
    HF_WRITTEN: ClassVar = {"attention_dropout": 0.0, "resid_dropout": 0.0, "embed_dropout": 0.0}

    family: Literal["gpt_neo"] = "gpt_neo"
    """model family: a file in mesh_transformer/families"""
    window: Annotated[Tokens, Hf("window_size")] = 256
    """number of tokens that a query sees in layers with a window, the last of them its own"""
    local_layers: Literal["odd", "none", "all"] = "odd"
    """layers with a window: the second, fourth ... layer, none or all"""

    def attention(self) -> AttentionSpec:
        """See `Gpt2Like`."""
        return replace(super().attention(), scale=1.0, bias=False)

    def windows(self) -> list[int | None]:
        """See `Gpt2Like`."""
        return [self.window if kind == "local" else None for kind in _kinds(self.local_layers, self.layers)]

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """See `HfKeys`."""
        fields = super().fields_from_hf(keys)
        if keys.flag("rotary", default=False):
            raise UserError(
                "rotary is true: this is GPT-J as a fork of transformers wrote it in 2021; read the model from a "
                "folder of GPT-J, such as EleutherAI/gpt-j-6b, whose model_type is gptj"
            )
        layers = fields["layers"]
        types = keys.take("attention_types", default=[[list(_TYPES), layers // 2]])
        kinds = keys.take("attention_layers", default=None) or _expanded(types, layers)
        known = [way for way in ("odd", "none", "all") if _kinds(way, layers) == kinds]
        if not known:
            raise UserError(
                f"attention_types is {types!r:.100}: only global, local, or global and local in turn, for {layers} "
                "layers, is supported"
            )
        return {**fields, "local_layers": known[0]}

    def to_hf(self) -> JsonObject:
        """See `HfKeys`."""
        kinds = _kinds(self.local_layers, self.layers)
        return {
            **super().to_hf(),
            "intermediate_size": None if self.d_ff == 4 * self.d_model else self.d_ff,
            "attention_types": [[kinds, 1]],
            "attention_layers": kinds,
        }

    def hf_tensors(self) -> list[Tensor]:
        """See `ModelConfig`."""
        block = "transformer.h.{}.attn.attention."
        attention = [Tensor(f"blocks/attention/{name}/w", f"{block}{name}_proj.weight", TRANSPOSED) for name in "qkv"]
        return self.rows([*attention, *matrix_rows("attention/o", f"{block}out_proj")], TRANSPOSED)


def _kinds(way: str, layers: int) -> list[str]:
    """The kind of attention of each layer."""
    if way == "odd":
        return [_TYPES[i % 2] for i in range(layers)]
    return [_TYPES[way == "all"]] * layers


def _expanded(types: Any, layers: int) -> list[str]:
    """The list of `attention_layers` that `attention_types`, [[[kind, ...], times], ...], stands for; empty if it is
    not for this number of layers."""
    try:
        # a list repeated more often than there are layers may not fit in memory
        fits = all(0 < times <= layers for _, times in types)
        fits = fits and sum(len(kinds) * times for kinds, times in types) == layers
        return [kind for kinds, times in types for kind in kinds * times] if fits else []
    except (TypeError, ValueError):
        return []
