"""OPT (Zhang et al. 2022, arXiv:2205.01068): GPT-2 with relu, and two unused rows of positions."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from mesh_transformer.errors import UserError
from mesh_transformer.families.base import HF_ACTIVATIONS, ActivationName
from mesh_transformer.families.gpt2 import Gpt2Like
from mesh_transformer.families.hf_keys import ConfigJson, Hf, Only
from mesh_transformer.families.rows import matrix_rows, model_rows, norm_rows
from mesh_transformer.fields import MOST_LAYERS
from mesh_transformer.spec import Decoder, Tensor

_EPS = 1e-5
_UNUSED_POSITIONS = 2


class OptConfig(Gpt2Like):
    """OPT: GPT-2 with relu, and a table of positions whose first two rows are unused."""

    HF_MODEL_TYPE: ClassVar = "opt"
    HF_ARCHITECTURE: ClassVar = "OPTForCausalLM"
    HF_PREFIX: ClassVar = "model."
    HF_BUFFERS: ClassVar = r"model\.decoder\.version"
    HF_END_OF_TEXT: ClassVar = 2
    HF_ROWS: ClassVar = {
        "layers": Hf("num_hidden_layers", most=MOST_LAYERS),
        "d_ff": Hf("ffn_dim"),
        # it is always 1e-5
        "norm_eps": None,
    }
    # OPT-350m has a narrower embedding, and its norms follow the sublayers
    HF_FIXED: ClassVar = {
        "do_layer_norm_before": Only(True),
        "_remove_final_layer_norm": Only(False),
        "enable_bias": Only(True),
        "layer_norm_elementwise_affine": Only(True),
    }
    HF_IGNORED: ClassVar = ("init_std",)
    HF_WRITTEN: ClassVar = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "vocab_size": 50272,
    }

    family: Literal["opt"] = "opt"
    """model family: a file in mesh_transformer/families"""
    activation: Annotated[ActivationName, Hf("activation_function", words=HF_ACTIVATIONS)] = "relu"
    """activation of the feed-forward layer: relu, the exact gelu or its approximation by tanh. gelu_fast and
    gelu_pytorch_tanh are further names of gelu_tanh, which exports keep"""

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        return replace(super().decoder(), unused_positions=_UNUSED_POSITIONS)

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> dict[str, Any]:
        """See `HfKeys`."""
        fields, width = super().fields_from_hf(keys), keys.take("word_embed_proj_dim", default=None)
        if width not in (None, fields["d_model"]):
            raise UserError(f"word_embed_proj_dim is {width!r:.60}: only hidden_size {fields['d_model']} is supported")
        return fields

    def to_hf(self) -> dict[str, Any]:
        """See `HfKeys`."""
        reasons = [f"model.norm_eps is {self.norm_eps:g}, not {_EPS:g}"] if self.norm_eps != _EPS else []
        self.refuse_hf(reasons, instead="native")
        return {**super().to_hf(), "word_embed_proj_dim": self.d_model}

    def hf_tensors(self) -> list[Tensor]:
        """See `ModelConfig`."""
        decoder, block = "model.decoder.", "model.decoder.layers.{}."
        rows = [
            Tensor("embed/positions/w", f"{decoder}embed_positions.weight"),
            *norm_rows("blocks/norm", f"{block}self_attn_layer_norm"),
            *norm_rows("blocks/ff_norm", f"{block}final_layer_norm"),
            *norm_rows("head/norm", f"{decoder}final_layer_norm"),
        ]
        for name in "qkv":
            rows += matrix_rows(f"attention/{name}", f"{block}self_attn.{name}_proj")
        rows += matrix_rows("attention/o", f"{block}self_attn.out_proj")
        rows += matrix_rows("ff/in", f"{block}fc1")
        rows += matrix_rows("ff/out", f"{block}fc2")
        return model_rows(f"{decoder}embed_tokens.weight", rows, "lm_head.weight", tied=self.tied_head)
