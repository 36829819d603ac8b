"""GPT-NeoX (Black et al. 2022), Pythia, and models such as rinna's with a sequential residual."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.base import ACTIVATIONS, HF_ACTIVATIONS, ActivationName, ModelConfig
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import ConfigJson, Hf, JsonObject
from mesh_transformer.families.rotary import part_of_head
from mesh_transformer.families.rows import matrix_rows, model_rows, norm_rows
from mesh_transformer.fields import Derived, Dims, Positive, Switch
from mesh_transformer.spec import AttentionSpec, Decoder, Dense, NormSpec, Rotary, Tensor, parallel_norms, sequential


class GptNeoXConfig(ModelConfig):
    """GPT-NeoX: rotary on the first dims of each head, biases, and a separate norm for the feed-forward layer."""

    HF_MODEL_TYPE: ClassVar = "gpt_neox"
    HF_ARCHITECTURE: ClassVar = "GPTNeoXForCausalLM"
    GGUF: ClassVar = Gguf("gptneox", rules=("parts_of_qkv",), required=("use_parallel_residual",))
    HF_BUFFERS: ClassVar = r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    HF_PREFIX: ClassVar = "gpt_neox."
    HF_D_HEAD_FIXED: ClassVar = True
    HF_END_OF_TEXT: ClassVar = 0
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 44,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "vocab_size": 50432,
    }
    HF_WRITTEN: ClassVar = {"attention_dropout": 0.0, "hidden_dropout": 0.0}

    family: Literal["gpt_neox"] = "gpt_neox"
    """model family: a file in mesh_transformer/families"""
    rotary_dims: Annotated[Dims, Derived("d_head / 4, even", of="d_head", rule=lambda dims: max(2, dims // 8 * 2))] = 0
    """number of leading dims of each head that rotary encoding rotates, at most d_head; of an odd number, one dim more
    is rotated, as in transformers"""
    rotary_base: Positive = 10000.0
    """base of the rotary frequencies"""
    parallel_residual: Annotated[Switch, Hf("use_parallel_residual")] = True
    """attention and feed-forward read the same residual stream; false: the feed-forward follows the attention"""
    norm_eps: Annotated[Positive, Hf("layer_norm_eps")] = 1e-5
    """epsilon that each norm adds to the variance"""
    activation: Annotated[ActivationName, Hf("hidden_act", words=HF_ACTIVATIONS)] = "gelu"
    """activation of the feed-forward layer: the exact gelu, its approximation by tanh, or relu. gelu_fast and
    gelu_pytorch_tanh are further names of gelu_tanh, which exports keep"""
    attention_bias: Annotated[Switch, Hf("attention_bias")] = True
    """biases on q, k, v and the output of the attention"""
    tied_head: Annotated[Switch, Hf("tie_word_embeddings")] = False
    """the head uses the token embeddings as its weights"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_rotary("rotary_dims", self.rotary_dims, odd=True)
        return self

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        norm = NormSpec(eps=self.norm_eps)
        attention = AttentionSpec(
            heads=self.n_heads,
            kv_heads=self.n_heads,
            head_dim=self.d_head,
            positions=Rotary(dims=self.rotary_dims, style="halves", base=self.rotary_base),
            bias=self.attention_bias,
            out_bias=self.attention_bias,
        )
        around = parallel_norms if self.parallel_residual else sequential
        layer = around(norm, attention, Dense(d_ff=self.d_ff, activation=ACTIVATIONS[self.activation]))
        return self.decoder_of([layer] * self.layers, norm, tied=self.tied_head)

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """See `HfKeys`. The keys of rotary encoding may be from transformers 5 or from earlier versions."""
        fields = super().fields_from_hf(keys)
        rotary = {
            "partial_rotary_factor": keys.take("rotary_pct", "partial_rotary_factor", default=0.25),
            "rope_theta": keys.take("rotary_emb_base", "rope_theta", default=10000.0),
        }
        newer = keys.take("rope_parameters", default=None) or keys.take("rope_scaling", default=None) or {}
        if not isinstance(newer, dict):
            raise UserError(f"rope_parameters is {newer!r:.60}: expected an object")
        rope = ConfigJson({**rotary, **newer})
        kind = rope.take("rope_type", "type", default="default")
        if kind != "default":
            raise UserError(f"rope_type is {kind!r:.60}: only default, without scaling, is supported")
        part = rope.number("partial_rotary_factor", default=0.25, most=1)
        return {
            **fields,
            "rotary_dims": int(fields["d_model"] // fields["n_heads"] * part),
            "rotary_base": rope.number("rope_theta", default=10000.0),
        }

    def to_hf(self) -> JsonObject:
        """See `HfKeys`."""
        part = part_of_head(self.rotary_dims, self.d_head)
        return {
            **super().to_hf(),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rotary_base,
                "partial_rotary_factor": part,
            },
            # transformers before 5 reads these keys
            "rotary_pct": part,
            "rotary_emb_base": self.rotary_base,
        }

    def hf_tensors(self) -> list[Tensor]:
        """See `ModelConfig`. transformers keeps q, k and v in one matrix: the rows of the first head, of the second,
        ..."""
        block = "gpt_neox.layers.{}."
        fused, sizes = f"{block}attention.query_key_value", {"h": self.n_heads, "part": 3}
        weights = [
            Tensor(f"blocks/attention/{name}/w", f"{fused}.weight", "(h part k) d -> part d (h k)", part, sizes)
            for part, name in enumerate("qkv")
        ]
        biases = [
            Tensor(f"blocks/attention/{name}/b", f"{fused}.bias", "(h part k) -> part (h k)", part, sizes)
            for part, name in enumerate("qkv")
        ]
        rows = [
            *norm_rows("blocks/norm", f"{block}input_layernorm"),
            *weights,
            *(biases if self.attention_bias else ()),
            *matrix_rows("attention/o", f"{block}attention.dense", bias=self.attention_bias),
            *norm_rows("blocks/ff_norm", f"{block}post_attention_layernorm"),
            *matrix_rows("ff/in", f"{block}mlp.dense_h_to_4h"),
            *matrix_rows("ff/out", f"{block}mlp.dense_4h_to_h"),
            *norm_rows("head/norm", "gpt_neox.final_layer_norm"),
        ]
        return model_rows("gpt_neox.embed_in.weight", rows, "embed_out.weight", tied=self.tied_head)
