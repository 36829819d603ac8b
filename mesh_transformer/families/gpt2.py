"""GPT-2 (Radford et al. 2019), and what GPT-Neo shares with it."""

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.base import ACTIVATIONS, HF_ACTIVATIONS, ActivationName, ModelConfig
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf, JsonObject, Only
from mesh_transformer.families.rows import matrix_rows, model_rows, norm_rows
from mesh_transformer.fields import Positive, Switch
from mesh_transformer.spec import AttentionSpec, Decoder, Dense, NormSpec, Tensor, sequential

# the keys of the original GPT-2, and newer names
GPT2_ROWS = {
    "layers": Hf("n_layer", "num_hidden_layers"),
    "d_model": Hf("n_embd", "hidden_size"),
    "n_heads": Hf("n_head", "num_attention_heads"),
    "d_ff": Hf("n_inner"),
    "seq": Hf("n_positions", "max_position_embeddings"),
}
GPT2_DROPOUTS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Gpt2Like(ModelConfig):
    """Learned positions, layer norms, biases, and a tied head."""

    HF_PREFIX: ClassVar = "transformer."
    HF_D_HEAD_FIXED: ClassVar = True
    HF_END_OF_TEXT: ClassVar = 50256

    norm_eps: Annotated[Positive, Hf("layer_norm_epsilon")] = 1e-5
    """epsilon that each norm adds to the variance"""
    activation: Annotated[ActivationName, Hf("activation_function", words=HF_ACTIVATIONS)] = "gelu_tanh"
    """activation of the feed-forward layer: the exact gelu, its approximation by tanh, or relu. gelu_fast and
    gelu_pytorch_tanh are further names of gelu_tanh, which exports keep"""
    tied_head: Annotated[Switch, Hf("tie_word_embeddings")] = True
    """the head uses the token embeddings as its weights"""

    def attention(self) -> AttentionSpec:
        """The attention of all layers, without a window."""
        return AttentionSpec(
            heads=self.n_heads, kv_heads=self.n_heads, head_dim=self.d_head, positions=None, bias=True, out_bias=True
        )

    def windows(self) -> list[int | None]:
        """The window of each layer."""
        return [None] * self.layers

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        norm, attention = NormSpec(eps=self.norm_eps), self.attention()
        ff = Dense(d_ff=self.d_ff, activation=ACTIVATIONS[self.activation])
        layer = functools.cache(lambda window: sequential(norm, replace(attention, window=window), ff))
        return replace(self.decoder_of(map(layer, self.windows()), norm, tied=self.tied_head), learned_positions=True)

    def rows(self, attention: Iterable[Tensor], view: str | None) -> list[Tensor]:
        """The rows of `hf_tensors`.

        Args:
            attention: the rows of the attention.
            view: the `view` of the feed-forward matrices.
        """
        block = "transformer.h.{}."
        rows = [
            Tensor("embed/positions/w", "transformer.wpe.weight"),
            *norm_rows("blocks/norm", f"{block}ln_1"),
            *attention,
            *norm_rows("blocks/ff_norm", f"{block}ln_2"),
            *matrix_rows("ff/in", f"{block}mlp.c_fc", view=view),
            *matrix_rows("ff/out", f"{block}mlp.c_proj", view=view),
            *norm_rows("head/norm", "transformer.ln_f"),
        ]
        return model_rows("transformer.wte.weight", rows, "lm_head.weight", tied=self.tied_head)


class Gpt2Config(Gpt2Like):
    """GPT-2: learned positions, layer norms, biases, and a tied head."""

    HF_MODEL_TYPE: ClassVar = "gpt2"
    HF_ARCHITECTURE: ClassVar = "GPT2LMHeadModel"
    GGUF: ClassVar = Gguf("gpt2", rules=("transposed",))
    HF_BUFFERS: ClassVar = r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"
    HF_DEFAULTS: ClassVar = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    HF_ROWS: ClassVar = GPT2_ROWS
    HF_FIXED: ClassVar = {"scale_attn_weights": Only(True, written=False)}
    HF_WRITTEN: ClassVar = GPT2_DROPOUTS

    family: Literal["gpt2"] = "gpt2"
    """model family: a file in mesh_transformer/families"""

    def to_hf(self) -> JsonObject:
        """See `HfKeys`."""
        return {**super().to_hf(), "n_inner": None if self.d_ff == 4 * self.d_model else self.d_ff}

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
        output = matrix_rows("attention/o", "transformer.h.{}.attn.c_proj", view=None)
        return self.rows([*attention, *output], None)
