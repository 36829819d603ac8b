"""BLOOM (BigScience Workshop 2022, arXiv:2211.05100): GPT-2 without positions, with ALiBi and an embedding norm."""

from dataclasses import replace
from typing import Any, ClassVar, Literal

from mesh_transformer.families.base import HF_ACTIVATIONS, ActivationName
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.gpt2 import Gpt2Like
from mesh_transformer.families.hf_keys import Hf, Only
from mesh_transformer.families.rows import matrix_rows, model_rows, norm_rows
from mesh_transformer.fields import MOST_LAYERS
from mesh_transformer.spec import Alibi, AttentionSpec, Decoder, NormSpec, Tensor


class BloomConfig(Gpt2Like):
    """BLOOM: GPT-2 with ALiBi instead of learned positions, and a norm of the embedding."""

    HF_MODEL_TYPE: ClassVar = "bloom"
    HF_ARCHITECTURE: ClassVar = "BloomForCausalLM"
    GGUF: ClassVar = Gguf("bloom", rules=("parts_of_qkv",), names={r"^transformer\.": ""})
    HF_BUFFERS: ClassVar = "(?!)"
    HF_END_OF_TEXT: ClassVar = 2
    HF_ROWS: ClassVar = {
        "layers": Hf("n_layer", "num_hidden_layers", most=MOST_LAYERS),
        "n_heads": Hf("n_head", "num_attention_heads"),
        "d_model": Hf("hidden_size", "n_embed"),
        "seq": Hf("seq_length"),
        # it is always 4 hidden_size, and the activation is always the tanh gelu
        "d_ff": None,
        "activation": None,
    }
    HF_FIXED: ClassVar = {"apply_residual_connection_post_layernorm": Only(False)}
    # of the released files; transformers ignores them, or computes the same
    HF_IGNORED: ClassVar = (
        *("pretraining_tp", "slow_but_exact", "skip_bias_add", "skip_bias_add_qkv", "offset_alibi"),
        *("masked_softmax_fusion", "bias_dropout_fusion", "attention_softmax_in_fp32"),
    )
    HF_WRITTEN: ClassVar = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    HF_DEFAULTS: ClassVar = {"n_layer": 2, "hidden_size": 64, "n_head": 8, "vocab_size": 250880}

    family: Literal["bloom"] = "bloom"
    """model family: a file in mesh_transformer/families"""
    activation: ActivationName = "gelu_tanh"
    """activation of the feed-forward layer: the exact gelu, its approximation by tanh, or relu; exports have the
    approximation"""

    def attention(self) -> AttentionSpec:
        """See `Gpt2Like`."""
        return replace(super().attention(), positions=Alibi())

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        return replace(super().decoder(), learned_positions=False, embed_norm=NormSpec(eps=self.norm_eps))

    def to_hf(self) -> dict[str, Any]:
        """See `HfKeys`."""
        reasons = []
        if self.d_ff != 4 * self.d_model:
            reasons.append(f"model.d_ff {self.d_ff} is not 4 x model.d_model {self.d_model}")
        if self.activation not in (name for name in HF_ACTIVATIONS if name not in ("gelu", "relu")):
            reasons.append(f"model.activation is {self.activation}, and {self.HF_ARCHITECTURE} has only gelu_tanh")
        self.refuse_hf(reasons, instead="native")
        return super().to_hf()

    def hf_tensors(self) -> list[Tensor]:
        """See `ModelConfig`. The fused matrix has the rows of the first head, then of the second, and so on."""
        block = "transformer.h.{}."
        rows = [
            *norm_rows("embed/norm", "transformer.word_embeddings_layernorm"),
            *norm_rows("blocks/norm", f"{block}input_layernorm"),
            *norm_rows("blocks/ff_norm", f"{block}post_attention_layernorm"),
            *norm_rows("head/norm", "transformer.ln_f"),
        ]
        fused, sizes = f"{block}self_attention.query_key_value", {"part": 3, "h": self.n_heads}
        for part, name in enumerate("qkv"):
            ours = f"blocks/attention/{name}"
            rows.append(Tensor(f"{ours}/w", f"{fused}.weight", "(h part k) d -> part d (h k)", part, sizes))
            rows.append(Tensor(f"{ours}/b", f"{fused}.bias", "(h part k) -> part (h k)", part, sizes))
        rows += matrix_rows("attention/o", f"{block}self_attention.dense")
        rows += matrix_rows("ff/in", f"{block}mlp.dense_h_to_4h")
        rows += matrix_rows("ff/out", f"{block}mlp.dense_4h_to_h")
        return model_rows("transformer.word_embeddings.weight", rows, "lm_head.weight", tied=self.tied_head)
