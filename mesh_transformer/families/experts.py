"""Routed experts in place of the feed-forward layer; most families with them otherwise equal Llama."""

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, ClassVar, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.base import ModelConfig
from mesh_transformer.families.hf_keys import ConfigJson, Hf, JsonObject
from mesh_transformer.families.llama import GATED, LlamaLike, gated_rows
from mesh_transformer.fields import Count, Derived, Dims, LayerNumbers, Positive, Switch, Unit
from mesh_transformer.spec import TRANSPOSED, Dense, ExpertsSpec, RouterSpec, Tensor


class ExpertCounts(ModelConfig):
    """How many experts a layer has, and how many of them a token goes through."""

    n_experts: Annotated[Count, Unit("experts"), Hf("num_experts", "num_local_experts")]
    """experts of a layer; divisible by mesh.ep"""
    experts_per_token: Annotated[Count, Unit("experts"), Hf("num_experts_per_tok")]
    """experts that each token goes through"""

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.experts_per_token > self.n_experts:
            raise UserError(
                f"model.experts_per_token {self.experts_per_token} exceeds model.n_experts {self.n_experts}: lower "
                "model.experts_per_token"
            )
        return self


class WithExperts(ExpertCounts, LlamaLike):
    """All layers have experts of width d_ff, and no shared experts."""

    # training alone uses them
    HF_IGNORED: ClassVar[tuple[str, ...]] = ("router_aux_loss_coef", "router_jitter_noise")
    # the module of a layer that holds router and experts, the matrices of an expert (ours and theirs), and the module
    # of the experts that all tokens share
    HF_MODULE: ClassVar = "mlp"
    HF_MATRICES: ClassVar = GATED
    HF_SHARED: ClassVar = "shared_expert"
    # the bias of the router
    HF_ROUTER_BIAS: ClassVar = "gate.e_score_correction_bias"

    def router(self) -> RouterSpec:
        """The router of all layers that have experts."""
        return RouterSpec(chosen=self.experts_per_token, normalize=True)

    def experts(self) -> ExpertsSpec:
        """The experts of all layers that have experts."""
        return ExpertsSpec(
            count=self.n_experts, d_ff=self.d_ff, d_ff_field="d_ff", activation=self.ACTIVATION, router=self.router()
        )

    def ffs(self) -> list[Dense | ExpertsSpec]:
        """See `LlamaLike`."""
        return [self.experts()] * self.layers

    def ff_tensors(self, block: str) -> list[Tensor]:
        """See `LlamaLike`."""
        experts, module = self.experts(), f"{block}{self.HF_MODULE}"
        rows = [Tensor("blocks/ff/router/w", f"{module}.gate.weight", TRANSPOSED)]
        if experts.router.bias:
            rows.append(Tensor("blocks/ff/router/bias", f"{module}.{self.HF_ROUTER_BIAS}"))
        rows += [
            Tensor(f"blocks/ff/experts/{name}", f"{module}.experts.{{e}}.{key}.weight", TRANSPOSED)
            for name, key in self.HF_MATRICES.items()
        ]
        if experts.shared is not None:
            rows += gated_rows("ff/shared", f"{module}.{self.HF_SHARED}")
        if experts.shared_gate:
            rows.append(Tensor("blocks/ff/shared_gate/w", f"{module}.{self.HF_SHARED}_gate.weight", TRANSPOSED))
        return rows + (gated_rows("ff", f"{block}mlp") if any(isinstance(ff, Dense) for ff in self.ffs()) else [])


class SomeDense(WithExperts):
    """Some layers have a dense feed-forward layer of width d_ff, the others have experts of another width."""

    expert_d_ff: Annotated[Dims, Derived("d_ff", of="d_ff"), Hf("moe_intermediate_size")] = 0
    """hidden width of an expert; divisible by mesh.tp"""
    dense_layers: LayerNumbers = ()
    """layers, numbered from 0, that have a dense feed-forward layer of width d_ff instead of experts"""
    router_normalize: Annotated[Switch, Hf("norm_topk_prob")] = False
    """the weights of a token's experts are divided by their sum"""

    @model_validator(mode="after")
    def _check_dense_layers(self) -> Self:
        self.check_layers("dense_layers", self.dense_layers)
        if len(self.dense_layers) == self.layers:
            raise UserError(
                f"model.dense_layers names all {self.layers} layers, and no layer has experts: shorten it, or use a "
                "model.family without experts"
            )
        return self

    def router(self) -> RouterSpec:
        """See `WithExperts`."""
        return replace(super().router(), normalize=self.router_normalize)

    def experts(self) -> ExpertsSpec:
        """See `WithExperts`."""
        return replace(super().experts(), d_ff=self.expert_d_ff, d_ff_field="expert_d_ff")

    def ffs(self) -> list[Dense | ExpertsSpec]:
        """See `LlamaLike`."""
        dense, of_both = set(self.dense_layers), (self.experts(), self.ff())
        return [of_both[layer in dense] for layer in range(self.layers)]


class GroupedExperts(SomeDense):
    """Dense first layers. A token chooses its experts from the best groups, and all tokens share further experts."""

    HF_SHARED: ClassVar = "shared_experts"
    HF_ROWS: ClassVar = {**SomeDense.HF_ROWS, "n_experts": Hf("n_routed_experts", "num_local_experts")}

    shared_d_ff: Annotated[Dims, Derived("expert_d_ff", of="expert_d_ff")] = 0
    """hidden width of the experts that all tokens go through, together, besides those that the router chooses;
    divisible by mesh.tp"""
    router_scale: Annotated[Positive, Hf("routed_scaling_factor")] = 1.0
    """the weights of a token's experts are multiplied by this number"""
    router_groups: Annotated[Count, Unit("groups"), Hf("n_group")] = 1
    """groups of experts; divides n_experts"""
    router_top_groups: Annotated[Count, Unit("groups"), Hf("topk_group")] = 1
    """groups with the best scores, from which a token's experts are chosen"""

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        groups, top = self.router_groups, self.router_top_groups
        of_group, chosen = self.n_experts // groups, self.experts_per_token
        if self.n_experts % groups or top > groups:
            raise UserError(
                f"model.router_groups {groups} must divide model.n_experts {self.n_experts}, and "
                f"model.router_top_groups {top} must not exceed it"
            )
        if chosen > top * of_group:
            raise UserError(
                f"model.experts_per_token {chosen} exceeds the {top * of_group} experts of model.router_top_groups "
                f"{top} groups: lower it to {top * of_group} or less, or raise model.router_top_groups"
            )
        if self.router().group_score == "two_best" and groups > 1 and of_group < 2:
            raise UserError(
                f"model.router_groups {groups} must be at most {self.n_experts // 2}: the score of a group is the sum "
                "of its two best"
            )
        return self

    def router(self) -> RouterSpec:
        """See `WithExperts`."""
        return replace(
            super().router(), scale=self.router_scale, groups=self.router_groups, top_groups=self.router_top_groups
        )

    def experts(self) -> ExpertsSpec:
        """See `WithExperts`."""
        shared = replace(self.ff(), d_ff=self.shared_d_ff, d_ff_field="shared_d_ff")
        return replace(super().experts(), shared=shared)

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """See `HfKeys`."""
        fields, defaults = super().fields_from_hf(keys), cls.HF_DEFAULTS
        dense = keys.size(
            "first_k_dense_replace", default=defaults["first_k_dense_replace"], least=0, most=fields["layers"]
        )
        shared = keys.size("n_shared_experts", default=defaults["n_shared_experts"])
        return {**fields, "dense_layers": tuple(range(dense)), "shared_d_ff": fields["expert_d_ff"] * shared}

    def to_hf(self) -> JsonObject:
        """See `ModelConfig`."""
        reasons = []
        if self.dense_layers != tuple(range(len(self.dense_layers))):
            reasons.append(f"model.dense_layers {list(self.dense_layers)} are not the first layers")
        if self.shared_d_ff % self.expert_d_ff:
            reasons.append(
                f"model.shared_d_ff {self.shared_d_ff} is not a multiple of model.expert_d_ff {self.expert_d_ff}"
            )
        self.refuse_hf(reasons, "native")
        return {
            **super().to_hf(),
            "first_k_dense_replace": len(self.dense_layers),
            "n_shared_experts": self.shared_d_ff // self.expert_d_ff,
        }


class SigmoidExperts(GroupedExperts):
    """The choice is by sigmoid and bias, as in DeepSeek-V3."""

    HF_WRITTEN: ClassVar = {**GroupedExperts.HF_WRITTEN, "num_nextn_predict_layers": 0}

    def router(self) -> RouterSpec:
        """See `WithExperts`."""
        return replace(super().router(), scores="sigmoid", bias=True, group_score="two_best", eps=1e-20)

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """See `HfKeys`."""
        # the layers that predict later tokens are not read
        keys.take("num_nextn_predict_layers", "num_mtp_layers", default=None)
        return super().fields_from_hf(keys)

    def hf_unused(self, stored: Collection[str]) -> set[str]:
        """See `ModelConfig`. The layer after the last predicts a later token."""
        later = f"model.layers.{self.layers}."
        is_later = f"{later}eh_proj.weight" in stored
        return super().hf_unused(stored) | {name for name in stored if is_later and name.startswith(later)}
