"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173): shared keys and values, layer norms, and no gate."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.base import ACTIVATIONS, HF_ACTIVATIONS, ActivationName
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf, Only
from mesh_transformer.families.mistral import MistralLike
from mesh_transformer.families.rows import matrix_rows
from mesh_transformer.fields import Positive, Switch
from mesh_transformer.spec import AttentionSpec, Dense, NormSpec, Tensor


class Starcoder2Config(MistralLike):
    """StarCoder2: Mistral with layer norms, biases, and a feed-forward layer without a gate."""

    HF_MODEL_TYPE: ClassVar = "starcoder2"
    HF_ARCHITECTURE: ClassVar = "Starcoder2ForCausalLM"
    GGUF: ClassVar = Gguf("starcoder2")
    HF_END_OF_TEXT: ClassVar = 50256
    HF_ROWS: ClassVar = {**MistralLike.HF_ROWS, "norm_eps": Hf("norm_epsilon")}
    # of the released files; transformers ignores them
    HF_FIXED: ClassVar = {
        "mlp_type": Only("default", written=False),
        "norm_type": Only("layer_norm", written=False),
    }
    HF_IGNORED: ClassVar = (
        *("activation_function", "layer_norm_epsilon"),
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
    )
    HF_WRITTEN: ClassVar = {**MistralLike.HF_WRITTEN, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 30,
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "intermediate_size": 12288,
        "vocab_size": 49152,
        "max_position_embeddings": 4096,
    }

    family: Literal["starcoder2"] = "starcoder2"
    """model family: a file in mesh_transformer/families"""
    norm_eps: Positive = 1e-5
    """epsilon that each norm adds to the variance"""
    activation: Annotated[ActivationName, Hf("hidden_act", words=HF_ACTIVATIONS)] = "gelu_pytorch_tanh"
    """activation of the feed-forward layer: the exact gelu, its approximation by tanh, or relu. gelu_tanh and gelu_fast
    are further names of gelu_pytorch_tanh, which exports keep"""
    bias: Annotated[Switch, Hf("use_bias")] = True
    """biases on the matrices of attention and feed-forward"""
    tied_head: Annotated[Switch, Hf("tie_word_embeddings")] = True
    """the head uses the token embeddings as its weights"""

    def norm(self) -> NormSpec:
        """See `LlamaLike`."""
        return NormSpec(eps=self.norm_eps)

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), bias=self.bias, out_bias=self.bias)

    def ff(self) -> Dense:
        """See `LlamaLike`."""
        return Dense(d_ff=self.d_ff, activation=ACTIVATIONS[self.activation], bias=self.bias)

    def ff_tensors(self, block: str) -> list[Tensor]:
        """See `LlamaLike`."""
        matrices = {"ff/in": f"{block}mlp.c_fc", "ff/out": f"{block}mlp.c_proj"}
        return [row for ours, theirs in matrices.items() for row in matrix_rows(ours, theirs, bias=self.bias)]
