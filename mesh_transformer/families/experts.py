"""Routed experts in place of the feed-forward layer; most families with them are like Llama in the rest."""

from typing import Annotated, ClassVar, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.base import ModelConfig
from mesh_transformer.families.hf_keys import Hf, JsonObject
from mesh_transformer.families.llama import GATED, LlamaLike, gated_rows
from mesh_transformer.fields import Count, Derived, Dims, LayerNumbers, Switch, Unit, size
from mesh_transformer.spec import TRANSPOSED, Dense, Experts, Router, Tensor


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

    def router(self) -> Router:
        """The router of all layers that have experts."""
        return Router(chosen=self.experts_per_token, normalize=True)

    def experts(self) -> Experts:
        """The experts of all layers that have experts."""
        return Experts(
            count=self.n_experts, d_ff=self.d_ff, d_ff_field="d_ff", activation=self.ACTIVATION, router=self.router()
        )

    def ffs(self) -> list[Dense | Experts]:
        """See `LlamaLike`."""
        return [self.experts()] * self.layers

    def ff_tensors(self, block: str) -> list[Tensor]:
        """See `LlamaLike`."""
        experts, module = self.experts(), f"{block}{self.HF_MODULE}"
        rows = [Tensor("blocks/ff/router/w", f"{module}.gate.weight", TRANSPOSED)]
        if experts.router.bias:
            rows.append(Tensor("blocks/ff/router/bias", f"{module}.gate.e_score_correction_bias"))
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

    expert_d_ff: Annotated[Dims, Derived("d_ff"), Hf("moe_intermediate_size")] = 0
    """hidden width of an expert; divisible by mesh.tp"""
    dense_layers: LayerNumbers = ()
    """layers, numbered from 0, that have a dense feed-forward layer of width d_ff instead of experts"""
    router_normalize: Annotated[Switch, Hf("norm_topk_prob")] = False
    """the weights of a token's experts are divided by their sum"""

    @classmethod
    def derive(cls, values: JsonObject) -> JsonObject:
        """Derive expert_d_ff too."""
        values = super().derive(values)
        if d_ff := size(values.get("d_ff")):
            values.setdefault("expert_d_ff", d_ff)
        return values

    @model_validator(mode="after")
    def _check_dense_layers(self) -> Self:
        dense = self.dense_layers
        if list(dense) != sorted(set(dense)) or (dense and dense[-1] >= self.layers):
            raise UserError(
                f"model.dense_layers {list(dense)} must be ascending and less than model.layers {self.layers}, the "
                "first layer being 0"
            )
        if len(dense) == self.layers:
            raise UserError(
                f"model.dense_layers names all {self.layers} layers, and no layer has experts: shorten it, or use a "
                "model.family without experts"
            )
        return self

    def router(self) -> Router:
        """See `WithExperts`."""
        return Router(chosen=self.experts_per_token, normalize=self.router_normalize)

    def experts(self) -> Experts:
        """See `WithExperts`."""
        return Experts(count=self.n_experts, d_ff=self.expert_d_ff, activation=self.ACTIVATION, router=self.router())

    def ffs(self) -> list[Dense | Experts]:
        """See `LlamaLike`."""
        dense, of_both = set(self.dense_layers), (self.experts(), self.ff())
        return [of_both[layer in dense] for layer in range(self.layers)]
