"""GPT-J (Wang and Komatsuzaki 2021), with the original's options for position encoding and norm."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.base import ModelConfig
from mesh_transformer.families.gpt2 import GPT2_DROPOUTS, GPT2_ROWS
from mesh_transformer.families.hf_keys import Hf, JsonObject, Only
from mesh_transformer.families.rows import matrix_rows, norm_rows
from mesh_transformer.fields import Derived, Dims
from mesh_transformer.spec import TRANSPOSED, AttentionSpec, Decoder, Dense, NormSpec, Rotary, Split, Tensor, parallel


def _one_norm(value: object) -> object:
    if value == "layernorm-desync":
        raise UserError(
            "each shard of the original had its own norm, and this program has one for all: did you mean layernorm?"
        )
    return value


NORMS = {
    "layernorm": NormSpec(),
    "layernorm-nobias": NormSpec(offset=False),
    "rmsnorm": NormSpec(kind="length", offset=False),
    "rmsnorm-bias": NormSpec(kind="length"),
    "scalenorm": NormSpec(kind="length", offset=False, one_scale=True),
    "scalenorm-bias": NormSpec(kind="length", one_scale=True),
}


# numbers in a table of angles, in float64: sines and cosines are computed before the first step
MOST_ANGLES = 1 << 25


class GptJConfig(ModelConfig):
    """GPT-J: attention and feed-forward in parallel after one norm; an untied head with a bias."""

    HF_MODEL_TYPE: ClassVar = "gptj"
    HF_ARCHITECTURE: ClassVar = "GPTJForCausalLM"
    # in files before 2023
    HF_BUFFERS: ClassVar = r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)"
    HF_PREFIX: ClassVar = "transformer."
    HF_D_HEAD_FIXED: ClassVar = True
    # the end token of GPT-2's tokenizer
    HF_END_OF_TEXT: ClassVar = 50256
    HF_DEFAULTS: ClassVar = {"n_layer": 28, "n_embd": 4096, "n_head": 16, "vocab_size": 50400, "rotary_dim": 64}
    HF_ROWS: ClassVar = GPT2_ROWS
    HF_FIXED: ClassVar = {
        # three names of one formula in transformers
        "activation_function": Only("gelu_new", "gelu_fast", "gelu_pytorch_tanh", what="the tanh gelu"),
        "layer_norm_epsilon": Only(1e-5),
    }
    # hf_tensors() names the tensor that a tied head shares
    HF_IGNORED: ClassVar = ("tie_word_embeddings",)
    HF_WRITTEN: ClassVar = {**GPT2_DROPOUTS, "tie_word_embeddings": False}

    family: Literal["gptj"] = "gptj"
    """model family: a file in mesh_transformer/families"""
    pe: Literal["rotary", "fixed", "t5"] = "rotary"
    """position encoding: rotary (GPT-J), fixed (a learned table) or t5 (relative bias)"""
    pe_rotary_dims: Annotated[
        Dims, Derived("d_head", of="d_head"), Hf("rotary_dim", why=", as transformers requires one")
    ] = 0
    """number of leading dims of each head that rotary encoding rotates; even, at most d_head (GPT-J-6B: 64 of 256)"""
    norm: Annotated[
        Literal["layernorm", "layernorm-nobias", "rmsnorm", "rmsnorm-bias", "scalenorm", "scalenorm-bias"],
        BeforeValidator(_one_norm),
    ] = "layernorm"
    """normalization before each block and before the head"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pe == "rotary":
            self.check_rotary("pe_rotary_dims", self.pe_rotary_dims)
        width = self.pe_rotary_dims if self.pe == "rotary" else 1
        if self.seq * width > MOST_ANGLES:
            raise UserError(
                f"model.seq {self.seq} is too long for the table of positions of this family: set it to "
                f"{MOST_ANGLES // width} or less"
            )
        return self

    def architecture(self) -> JsonObject:
        """See `ModelConfig`. pe_rotary_dims is left out without rotary encoding."""
        fields = super().architecture()
        return fields if self.pe == "rotary" else {k: v for k, v in fields.items() if k != "pe_rotary_dims"}

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        rotary = Rotary(dims=self.pe_rotary_dims, style="pairs", precision="float64")
        attention = AttentionSpec(
            heads=self.n_heads,
            kv_heads=self.n_heads,
            head_dim=self.d_head,
            positions=rotary if self.pe == "rotary" else None,
        )
        layer = parallel(NORMS[self.norm], attention, Dense(d_ff=self.d_ff, activation="gelu_tanh"))
        return replace(
            self.decoder_of([layer] * self.layers, NORMS[self.norm], tied=False),
            embed_bias=True,
            learned_positions=self.pe == "fixed",
            relative_bias=self.pe == "t5",
            head_bias=True,
        )

    def to_hf(self) -> JsonObject:
        """See `HfKeys`."""
        reasons = []
        if self.pe != "rotary":
            reasons.append(f"model.pe is {self.pe}, but GPTJForCausalLM supports only rotary")
        if self.norm != "layernorm":
            reasons.append(f"model.norm is {self.norm}, but GPTJForCausalLM supports only layernorm")
        self.refuse_hf(reasons, instead="native or classic")
        return {**super().to_hf(), "n_inner": None if self.d_ff == 4 * self.d_model else self.d_ff}

    def hf_tensors(self) -> list[Tensor]:
        """See `ModelConfig`. transformers rotates the pairs (0, 1), (2, 3), ... too; it has no bias on the
        embedding."""
        table, block = "transformer.wte.weight", "transformer.h.{}."
        return [
            Tensor("embed/tokens/w", table, vocab_axis=0, bias="embed/tokens/b"),
            *norm_rows("blocks/norm", f"{block}ln_1"),
            *(Tensor(f"blocks/attention/{name}/w", f"{block}attn.{name}_proj.weight", TRANSPOSED) for name in "qkv"),
            Tensor("blocks/attention/o/w", f"{block}attn.out_proj.weight", TRANSPOSED),
            *matrix_rows("ff/in", f"{block}mlp.fc_in"),
            *matrix_rows("ff/out", f"{block}mlp.fc_out"),
            *norm_rows("head/norm", "transformer.ln_f"),
            Tensor("head/logits/w", "lm_head.weight", TRANSPOSED, vocab_axis=1, tied=table),
            Tensor("head/logits/b", "lm_head.bias", vocab_axis=0),
        ]

    def classic_tensors(self) -> list[Tensor]:
        """See `ModelConfig`."""
        if self.n_heads * self.d_head != self.d_model or self.d_ff != 4 * self.d_model:
            raise UserError(
                f"the classic format cannot hold this model: it needs model.d_head = d_model / n_heads "
                f"({self.d_model} / {self.n_heads}, given {self.d_head}) and model.d_ff = 4 * d_model (given "
                f"{self.d_ff})"
            )
        embed, head, block = "embedding_shard/~/linear/", "projection_shard/~/", "layer_{}/~/"
        rows = [
            Tensor("embed/tokens/w", embed + "w", vocab_axis=0),
            Tensor("embed/tokens/b", embed + "b", split=Split.SUM),
            Tensor("blocks/attention/q/w", block + "linear/w", split=Split.COLUMNS),
            Tensor("blocks/attention/v/w", block + "linear_1/w", split=Split.COLUMNS),
            Tensor("blocks/attention/k/w", block + "linear_2/w", split=Split.COLUMNS),
            Tensor("blocks/attention/o/w", block + "linear_3/w"),
            Tensor("blocks/ff/in/w", block + "linear_4/w", split=Split.COLUMNS),
            Tensor("blocks/ff/in/b", block + "linear_4/b", split=Split.COLUMNS),
            Tensor("blocks/ff/out/w", block + "linear_5/w"),
            Tensor("blocks/ff_out/b", block + "linear_5/b", split=Split.SUM),
            Tensor("head/logits/w", head + "linear/w", vocab_axis=1, split=Split.COLUMNS),
            Tensor("head/logits/b", head + "linear/b", vocab_axis=0, split=Split.COLUMNS),
            *self._classic_norm("blocks/norm", block),
            *self._classic_norm("head/norm", head),
        ]
        if self.pe == "fixed":
            rows.append(Tensor("embed/positions/w", "embedding_shard/pos_embs", split=Split.COLUMNS))
        if self.pe == "t5":
            rows.append(Tensor("embed/relative/w", "relative_position_embs/rel_embedding"))
        return rows

    def _classic_norm(self, parameter: str, module: str) -> list[Tensor]:
        if self.norm.startswith("layernorm"):
            module, split = f"{module}replicated_layer_norm", Split.FIRST
        else:
            module, split = f"{module}rms_norm", Split.MEAN
        scale = Tensor(f"{parameter}/scale", f"{module}/scale", split=split)
        if NORMS[self.norm].offset:
            return [scale, Tensor(f"{parameter}/offset", f"{module}/offset", split=split)]
        if self.norm == "layernorm-nobias":
            return [scale, Tensor(f"{parameter}/scale", f"{module}/offset", split=Split.UNUSED)]
        return [scale]
