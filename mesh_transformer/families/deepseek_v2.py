"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv:2405.04434): latent attention, and experts after some dense layers."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.experts import GroupedExperts
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import ConfigJson, Hf, JsonObject, Only
from mesh_transformer.families.rotary import yarn_factor
from mesh_transformer.families.rows import bias_of
from mesh_transformer.fields import Derived, Dims, Positive, Switch, size
from mesh_transformer.spec import TRANSPOSED, LatentAttentionSpec, NormSpec, Rotary, Tensor

_MSCALES = {"rotary_mscale": "mscale", "rotary_mscale_all_dims": "mscale_all_dim"}
# transformers has this number for the norms of latents, whatever rms_norm_eps is
_LATENT_EPS = 1e-6


class DeepSeekLike(GroupedExperts):
    """Latent attention, dense first layers, and experts with some that all tokens share."""

    ROTARY_FIELD: ClassVar = "rotary_dims"
    HF_FIXED: ClassVar = {**GroupedExperts.HF_FIXED, "moe_layer_freq": Only(1, written=False)}
    HF_IGNORED: ClassVar[tuple[str, ...]] = (
        *GroupedExperts.HF_IGNORED,
        *("qk_head_dim", "auto_map", "ep_size", "pretraining_tp", "aux_loss_alpha", "seq_aux"),
    )

    d_head: Annotated[Dims, Derived("nope_dims + rotary_dims")] = 0
    """width of a head of queries and keys"""
    q_rank: Annotated[Dims | None, Hf("q_lora_rank")] = None
    """width of the latent from which the queries are made; absent: they are made from the residual stream"""
    kv_rank: Annotated[Dims, Hf("kv_lora_rank")]
    """width of the latent from which keys and values are made, and which the cache holds"""
    nope_dims: Annotated[Dims, Hf("qk_nope_head_dim")]
    """dims of a head of queries and keys that are not rotated"""
    rotary_dims: Annotated[Dims, Hf("qk_rope_head_dim")]
    """dims of a head of queries and keys that are rotated; keys share them between heads"""
    v_dims: Annotated[Dims, Hf("v_head_dim")]
    """width of a head of values"""
    attention_bias: Annotated[Switch, Hf("attention_bias")] = False
    """biases on the matrices that make the latents, and on the output of the attention"""
    rotary_mscale: Positive | None = None
    """yarn: with rotary_mscale_all_dims, sines and cosines are multiplied by (0.1 rotary_mscale ln(rotary_factor) + 1)
    / (0.1 rotary_mscale_all_dims ln(rotary_factor) + 1); rotary_attention_factor replaces this"""
    rotary_mscale_all_dims: Positive | None = None
    """yarn: the products of queries and keys are multiplied by (0.1 rotary_mscale_all_dims ln(rotary_factor) + 1)^2"""

    @classmethod
    def derive(cls, values: JsonObject) -> JsonObject:
        """Derive d_head too."""
        dims = [size(values.get(name)) for name in ("nope_dims", "rotary_dims")]
        if "d_head" not in values and dims[0] and dims[1]:
            values = {**values, "d_head": dims[0] + dims[1]}
        return super().derive(values)

    @model_validator(mode="after")
    def _check_latent_attention(self) -> Self:
        if self.n_kv_heads != self.n_heads:
            raise UserError(
                f"model.n_kv_heads {self.n_kv_heads} is not model.n_heads {self.n_heads}: each head of latent "
                "attention has its own keys and values; remove model.n_kv_heads"
            )
        if self.d_head != self.nope_dims + self.rotary_dims:
            raise UserError(
                f"model.d_head {self.d_head} is not model.nope_dims {self.nope_dims} + model.rotary_dims "
                f"{self.rotary_dims}: remove model.d_head"
            )
        for name in _MSCALES:
            if getattr(self, name) is not None and self.rotary_scaling != "yarn":
                raise UserError(f"model.{name} has no effect without model.rotary_scaling yarn: remove it")
        return self

    def rotary(self) -> Rotary:
        """See `RotaryConfig`."""
        return replace(super().rotary(), style="pairs")

    def attention(self) -> LatentAttentionSpec:  # type: ignore[override]
        """The attention of all layers, without a window."""
        scale = None
        if self.rotary_mscale_all_dims is not None:
            assert self.rotary_factor is not None
            scale = self.d_head**-0.5 * yarn_factor(self.rotary_factor, self.rotary_mscale_all_dims) ** 2
        return LatentAttentionSpec(
            heads=self.n_heads,
            q_rank=self.q_rank,
            kv_rank=self.kv_rank,
            nope_dims=self.nope_dims,
            v_dims=self.v_dims,
            positions=self.rotary(),
            norm=NormSpec(kind="rms", eps=_LATENT_EPS, offset=False),
            scale=scale,
            bias=self.attention_bias,
        )

    def attention_factor(self, factor: float) -> float:
        """See `RotaryConfig`."""
        if self.rotary_mscale is None or self.rotary_mscale_all_dims is None:
            return super().attention_factor(factor)
        return yarn_factor(factor, self.rotary_mscale) / yarn_factor(factor, self.rotary_mscale_all_dims)

    @classmethod
    def mscales_from_hf(cls, fields: JsonObject, mscale: float | None, all_dims: float | None) -> JsonObject:
        """See `RotaryConfig`."""
        if all_dims and fields["rotary_scaling"] not in ("yarn", "none"):
            raise UserError(f"mscale_all_dim is {all_dims!r:.60}: it is only supported with rope_type yarn")
        if fields["rotary_scaling"] != "yarn":
            return {}
        # 0 is absent
        return {name: value or None for name, value in zip(_MSCALES, (mscale, all_dims), strict=True)}

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """See `HfKeys`."""
        fields = super().fields_from_hf(keys)
        if (value := keys.take("rope_interleave", default=True)) not in (True,):
            raise UserError(f"rope_interleave is {value!r:.60}: only True is supported")
        return {
            **fields,
            # their head_dim is the rotary dims
            "d_head": fields["nope_dims"] + fields["rotary_dims"],
        }

    def to_hf(self) -> JsonObject:
        """See `ModelConfig`."""
        return {**super().to_hf(), "head_dim": self.rotary_dims}

    def rotary_to_hf(self) -> JsonObject:
        """See `RotaryConfig`."""
        given = {key: value for field, key in _MSCALES.items() if (value := getattr(self, field)) is not None}
        keys = super().rotary_to_hf()
        return keys | {name: {**keys[name], **given} for name in ("rope_parameters", "rope_scaling") if keys[name]}

    def attention_tensors(self, block: str) -> list[Tensor]:
        """See `LlamaLike`."""
        ours, theirs = "blocks/attention", f"{block}self_attn"
        queries = {"q": "q_proj"} if self.q_rank is None else {"q_a": "q_a_proj", "q_b": "q_b_proj"}
        matrices = {**queries, "kv_a": "kv_a_proj_with_mqa", "o": "o_proj"}
        norms = {"kv_norm": "kv_a_layernorm", **({} if self.q_rank is None else {"q_norm": "q_a_layernorm"})}
        rows = [Tensor(f"{ours}/{name}/w", f"{theirs}.{key}.weight", TRANSPOSED) for name, key in matrices.items()]
        rows += [Tensor(f"{ours}/{name}/scale", f"{theirs}.{key}.weight") for name, key in norms.items()]
        rows.append(
            Tensor(f"{ours}/kv_b/w", f"{theirs}.kv_b_proj.weight", "(h k) r -> h r k", sizes={"h": self.n_heads})
        )
        biased = [name for name in ("q_a", "kv_a", "o") if self.attention_bias and name in matrices]
        return rows + [Tensor(bias_of(f"attention/{name}"), f"{theirs}.{matrices[name]}.bias") for name in biased]


class DeepSeekV2Config(DeepSeekLike):
    """DeepSeek-V2: latent attention, and experts that are chosen by their softmax, after some dense layers."""

    HF_MODEL_TYPE: ClassVar = "deepseek_v2"
    HF_ARCHITECTURE: ClassVar = "DeepseekV2ForCausalLM"
    GGUF: ClassVar = Gguf("deepseek2", assumed={"router_normalize": False}, split_kv_b=True)
    HF_HEADS_DIVIDE_WIDTH: ClassVar = True
    HF_END_OF_TEXT: ClassVar = 100001
    HF_ROWS: ClassVar = {**DeepSeekLike.HF_ROWS, "router_normalize": None}
    # transformers takes it for granted
    HF_FIXED: ClassVar = {**DeepSeekLike.HF_FIXED, "scoring_func": Only("softmax")}
    HF_WRITTEN: ClassVar = {**DeepSeekLike.HF_WRITTEN, "norm_topk_prob": False}
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 102400,
        "max_position_embeddings": 2048,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": None,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
    }

    family: Literal["deepseek_v2"] = "deepseek_v2"
    """model family: a file in mesh_transformer/families"""

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """See `LlamaLike`."""
        fields, method = super().fields_from_hf(keys), keys.take("topk_method", default="greedy")
        if method not in _METHODS:
            raise UserError(f"topk_method is {method!r:.60}: only {' and '.join(_METHODS)} are supported")
        return fields if method == "group_limited_greedy" else {**fields, "router_groups": 1, "router_top_groups": 1}

    def to_hf(self) -> JsonObject:
        """See `ModelConfig`."""
        if self.router_normalize:
            reason = f"{self.HF_ARCHITECTURE} computes it without model.router_normalize"
            self.refuse_hf([reason], "native")
        return {**super().to_hf(), "topk_method": _METHODS[self.router_groups > 1]}


_METHODS = ("greedy", "group_limited_greedy")
