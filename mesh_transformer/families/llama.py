"""Llama 1 to 3 (Touvron et al. 2023, Grattafiori et al. 2024), and what its descendants share with it."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf, JsonObject, Only
from mesh_transformer.families.rotary import RotaryConfig
from mesh_transformer.families.rows import bias_of, matrix_rows, model_rows, norm_rows
from mesh_transformer.fields import MOST_LAYERS, Derived, Heads, Positive, Switch
from mesh_transformer.spec import (
    TRANSPOSED,
    Activation,
    AttentionMixer,
    AttentionSpec,
    Decoder,
    Dense,
    ExpertsSpec,
    Layer,
    Mechanism,
    NormSpec,
    Rotary,
    Tensor,
    sequential,
)

# the matrices of a gated feed-forward layer, ours and theirs
GATED = {"gate": "gate_proj", "in": "up_proj", "out": "down_proj"}


class LlamaLike(RotaryConfig):
    """Root mean square norms, rotary encoding, shared keys and values, and a gated feed-forward layer."""

    # whether the config class of transformers refuses a hidden_size that num_attention_heads does not divide
    HF_HEADS_DIVIDE_WIDTH: ClassVar = False
    HF_BUFFERS: ClassVar = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    HF_PREFIX: ClassVar = "model."
    HF_END_OF_TEXT: ClassVar = 2
    # a decoder lists its layers
    HF_ROWS: ClassVar = {"layers": Hf("num_hidden_layers", most=MOST_LAYERS), "d_head": Hf("head_dim", null=True)}
    # two names of one function
    HF_FIXED: ClassVar = {"hidden_act": Only("silu", "swish")}
    HF_WRITTEN: ClassVar = {"attention_dropout": 0.0}
    ACTIVATION: ClassVar[Activation] = "silu"
    # one matrix holds the rows of gate and in
    HF_FUSED_GATE: ClassVar = False

    n_kv_heads: Annotated[Heads, Derived("n_heads", of="n_heads"), Hf("num_key_value_heads", null=True)] = 0
    """heads of keys and values, each shared by n_heads / n_kv_heads query heads; mesh.tp splits them if it divides
    their number, else each device holds all of them"""
    norm_eps: Annotated[Positive, Hf("rms_norm_eps")] = 1e-6
    """epsilon that each norm adds to the mean square"""
    tied_head: Annotated[Switch, Hf("tie_word_embeddings")] = False
    """the head uses the token embeddings as its weights"""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise UserError(
                f"model.n_heads {self.n_heads} is not divisible by model.n_kv_heads {self.n_kv_heads}: change one of "
                "them"
            )
        return self

    def norm(self) -> NormSpec:
        """Every norm of the model."""
        return NormSpec(kind="rms", eps=self.norm_eps, offset=False)

    def attention(self) -> AttentionSpec:
        """The attention of all layers, without a window."""
        return AttentionSpec(
            heads=self.n_heads, kv_heads=self.n_kv_heads, head_dim=self.d_head, positions=self.rotary()
        )

    def ff(self) -> Dense:
        """The feed-forward of the dense layers."""
        return Dense(d_ff=self.d_ff, activation=self.ACTIVATION, gated=True, bias=False)

    def layer(self, attention: AttentionMixer, ff: Mechanism) -> Layer:
        """A layer with these mechanisms."""
        return sequential(self.norm(), attention, ff)

    def windows(self) -> list[int | None]:
        """The window of each layer."""
        return [None] * self.layers

    def rotaries(self) -> list[Rotary]:
        """The rotary encoding of each layer."""
        return [self.rotary()] * self.layers

    def ffs(self) -> list[Dense | ExpertsSpec]:
        """The feed-forward of each layer."""
        return [self.ff()] * self.layers

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        attention = self.attention()
        of_layers = zip(self.windows(), self.rotaries(), self.ffs(), strict=True)
        # equal layers are one object
        layer = functools.cache(
            lambda window, rotary, ff: self.layer(replace(attention, window=window, positions=rotary), ff)
        )
        return self.decoder_of(itertools.starmap(layer, of_layers), self.norm(), tied=self.tied_head)

    def to_hf(self) -> JsonObject:
        """See `HfKeys`."""
        if self.HF_HEADS_DIVIDE_WIDTH and self.d_model % self.n_heads:
            reason = f"{self.HF_ARCHITECTURE} requires that model.n_heads divides model.d_model"
            self.refuse_hf([reason], "native")
        return super().to_hf()

    def norms_to_hf(self) -> dict[str, str]:
        """The names of a layer's norms, ours and theirs."""
        return {"norm": "input_layernorm", "ff_norm": "post_attention_layernorm"}

    def hf_tensors(self) -> list[Tensor]:
        """See `ModelConfig`."""
        block, offset, rows = "model.layers.{}.", self.norm().offset, list[Tensor]()
        for ours, theirs in self.norms_to_hf().items():
            rows += norm_rows(f"blocks/{ours}", f"{block}{theirs}", offset=offset)
        rows += self.attention_tensors(block)
        rows += self.ff_tensors(block)
        rows += norm_rows("head/norm", "model.norm", offset=offset)
        return model_rows("model.embed_tokens.weight", rows, "lm_head.weight", tied=self.tied_head)

    def attention_tensors(self, block: str) -> list[Tensor]:
        """The rows of the attention; `block` begins their names."""
        attention, rows = self.attention(), list[Tensor]()
        for name in "qkvo":
            bias = attention.out_bias if name == "o" else attention.bias
            rows += matrix_rows(f"attention/{name}", f"{block}self_attn.{name}_proj", bias=bias)
        if attention.qk_norm:
            rows += [
                Tensor(f"blocks/attention/{name}_norm/scale", f"{block}self_attn.{name}_norm.weight") for name in "qk"
            ]
        return rows

    def ff_tensors(self, block: str) -> list[Tensor]:
        """The rows of the feed-forward layers; `block` begins their names."""
        if self.HF_FUSED_GATE:
            gate = fused_rows(
                dict.fromkeys(("blocks/ff/gate/w", "blocks/ff/in/w"), self.d_ff), f"{block}mlp.gate_up_proj.weight"
            )
            return [*gate, Tensor("blocks/ff/out/w", f"{block}mlp.down_proj.weight", TRANSPOSED)]
        rows = gated_rows("ff", f"{block}mlp")
        for ours, theirs in GATED.items() if self.ff().bias else ():
            rows.append(Tensor(bias_of(f"ff/{ours}"), f"{block}mlp.{theirs}.bias"))
        return rows


def gated_rows(ours: str, theirs: str) -> list[Tensor]:
    """The rows of the matrices of a gated feed-forward layer, given the beginning of their names."""
    return [Tensor(f"blocks/{ours}/{name}/w", f"{theirs}.{key}.weight", TRANSPOSED) for name, key in GATED.items()]


def fused_rows(sizes: Mapping[str, int], theirs: str) -> list[Tensor]:
    """The rows of matrices that are one after the other in one matrix; by parameter, the outputs of each."""
    starts = itertools.accumulate(sizes.values(), initial=0)
    return [
        Tensor(name, theirs, TRANSPOSED, of_rows=sum(sizes.values()), first_row=start)
        for name, start in zip(sizes, starts, strict=False)
    ]


class BiasedAttention(LlamaLike):
    """The attention may have biases. The field stands last in a family that names this class first."""

    attention_bias: Annotated[Switch, Hf("attention_bias")] = False
    """biases on q, k, v and the output of the attention"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), bias=self.attention_bias, out_bias=self.attention_bias)


class BiasedLlama(BiasedAttention):
    """Llama that may have biases."""

    ff_bias: Annotated[Switch, Hf("mlp_bias")] = False
    """biases on the matrices of the feed-forward layer"""

    def ff(self) -> Dense:
        """See `LlamaLike`."""
        return replace(super().ff(), bias=self.ff_bias)


class LlamaConfig(BiasedLlama):
    """Llama: root mean square norms, rotary encoding, shared keys and values, and a gated feed-forward layer."""

    HF_MODEL_TYPE: ClassVar = "llama"
    HF_ARCHITECTURE: ClassVar = "LlamaForCausalLM"
    GGUF: ClassVar = Gguf("llama", rules=("permuted_heads",))
    HF_HEADS_DIVIDE_WIDTH: ClassVar = True
    # transformers ignores it
    HF_IGNORED: ClassVar = ("pretraining_tp",)
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    }

    family: Literal["llama"] = "llama"
    """model family: a file in mesh_transformer/families"""
