"""GPT-2 (Radford et al. 2019), and what GPT-Neo shares with it."""

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from mesh_transformer.errors import UserError
from mesh_transformer.families.base import ACTIVATIONS, ActivationName, ConfigJson, ModelConfig
from mesh_transformer.fields import Positive, Switch
from mesh_transformer.spec import TRANSPOSED, Attention, Decoder, Dense, Norm, Tensor, sequential


class Gpt2Like(ModelConfig):
    """Learned positions, layer norms, biases, and a tied head."""

    HF_PREFIX: ClassVar = "transformer."
    HF_END_OF_TEXT: ClassVar = 50256

    norm_eps: Positive = 1e-5
    """epsilon that each norm adds to the variance"""
    activation: ActivationName = "gelu_tanh"
    """activation of the feed-forward layer: the exact gelu, its approximation by tanh, or relu. gelu_fast and
    gelu_pytorch_tanh are further names of gelu_tanh, which exports keep"""
    tied_head: Switch = True
    """the head uses the token embeddings as its weights"""

    def attention(self) -> Attention:
        """The attention of all layers, without a window."""
        return Attention(
            heads=self.n_heads, kv_heads=self.n_heads, head_dim=self.d_head, rotary=None, bias=True, out_bias=True
        )

    def windows(self) -> list[int | None]:
        """The window of each layer."""
        return [None] * self.layers

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        norm, attention = Norm(eps=self.norm_eps), self.attention()
        ff = Dense(d_ff=self.d_ff, activation=ACTIVATIONS[self.activation])
        layer = functools.cache(lambda window: sequential(norm, replace(attention, window=window), ff))
        return Decoder(
            d_model=self.d_model,
            n_vocab=self.n_vocab,
            vocab_multiple=self.vocab_multiple,
            seq=self.seq,
            layers=tuple(layer(window) for window in self.windows()),
            final_norm=norm,
            learned_positions=True,
            tied=self.tied_head,
        )

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> dict[str, Any]:
        """The fields that both families have under one key."""
        activation = keys.take("activation_function", default="gelu_new")
        return {
            "n_vocab": keys.size("vocab_size", default=50257),
            "norm_eps": keys.number("layer_norm_epsilon", default=1e-5),
            "activation": cls.activation_from_hf(activation, "activation_function"),
            "tied_head": keys.flag("tie_word_embeddings", default=True),
        }

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`."""
        self.refuse_hf([], instead="native")
        return {
            "vocab_size": self.n_vocab,
            "layer_norm_epsilon": self.norm_eps,
            "activation_function": self.activation_to_hf(self.activation),
            "tie_word_embeddings": self.tied_head,
        }

    def rows(self, attention: Iterable[Tensor], view: str | None) -> list[Tensor]:
        """The rows of `hf_tensors`; those of the attention are given, and `view` is that of the other matrices."""
        block, head = "transformer.h.{}.", "lm_head.weight"
        copy = head if self.tied_head else None
        rows = [
            Tensor("embed/tokens/w", "transformer.wte.weight", vocab_axis=0, copy=copy),
            Tensor("embed/positions/w", "transformer.wpe.weight"),
            Tensor("blocks/norm/scale", block + "ln_1.weight"),
            Tensor("blocks/norm/offset", block + "ln_1.bias"),
            *attention,
            Tensor("blocks/ff_norm/scale", block + "ln_2.weight"),
            Tensor("blocks/ff_norm/offset", block + "ln_2.bias"),
            Tensor("blocks/ff/in/w", block + "mlp.c_fc.weight", view),
            Tensor("blocks/ff/in/b", block + "mlp.c_fc.bias"),
            Tensor("blocks/ff/out/w", block + "mlp.c_proj.weight", view),
            Tensor("blocks/ff_out/b", block + "mlp.c_proj.bias"),
            Tensor("head/norm/scale", "transformer.ln_f.weight"),
            Tensor("head/norm/offset", "transformer.ln_f.bias"),
        ]
        return rows if self.tied_head else [*rows, Tensor("head/logits/w", head, TRANSPOSED, vocab_axis=1)]


class Gpt2Config(Gpt2Like):
    """GPT-2: learned positions, layer norms, biases, and a tied head."""

    HF_MODEL_TYPE: ClassVar = "gpt2"
    HF_ARCHITECTURE: ClassVar = "GPT2LMHeadModel"
    HF_BUFFERS: ClassVar = r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"

    family: Literal["gpt2"] = "gpt2"
    """model family: a file in mesh_transformer/families"""

    @classmethod
    def from_hf(cls, keys: ConfigJson) -> Self:
        """See `ModelConfig`."""
        if not keys.flag("scale_attn_weights", default=True):
            raise UserError("scale_attn_weights is false: only true is supported")
        return cls(
            layers=keys.size("n_layer", "num_hidden_layers", default=12),
            d_model=keys.size("n_embd", "hidden_size", default=768),
            n_heads=keys.size("n_head", "num_attention_heads", default=12),
            d_ff=keys.size("n_inner", default=None),
            seq=keys.size("n_positions", "max_position_embeddings", default=1024),
            **cls.fields_from_hf(keys),
        )

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`."""
        return {
            **super().to_hf(),
            "n_layer": self.layers,
            "n_embd": self.d_model,
            "n_head": self.n_heads,
            "n_inner": None if self.d_ff == 4 * self.d_model else self.d_ff,
            "n_positions": self.seq,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }

    def hf_tensors(self) -> list[Tensor]:
        """See `ModelConfig`. The matrices are stored (in, out); q, k and v are columns of one matrix."""
        fused, sizes = "transformer.h.{}.attn.c_attn", {"part": 3}
        attention = [
            row
            for part, name in enumerate("qkv")
            for row in (
                Tensor(f"blocks/attention/{name}/w", f"{fused}.weight", "d (part f) -> part d f", part, sizes),
                Tensor(f"blocks/attention/{name}/b", f"{fused}.bias", "(part f) -> part f", part, sizes),
            )
        ]
        attention.append(Tensor("blocks/attention/o/w", "transformer.h.{}.attn.c_proj.weight"))
        attention.append(Tensor("blocks/attention_out/b", "transformer.h.{}.attn.c_proj.bias"))
        return self.rows(attention, None)
