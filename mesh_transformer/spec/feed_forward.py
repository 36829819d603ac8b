"""Feed-forward layers as plain data: dense ones, and routed experts."""

from dataclasses import dataclass
from typing import Literal

from mesh_transformer.fields import Size
from mesh_transformer.spec.arrays import Array, Arrays, below, lecun_stddev, linear
from mesh_transformer.spec.mechanism import Mechanism

Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu_squared"]


@dataclass(frozen=True, kw_only=True)
class Dense(Mechanism):
    """activation(x w_in + b) w_out + b; gated: (activation(x w_gate + b) * (x w_in + b)) w_out + b (Shazeer 2020,
    arXiv:2002.05202)."""

    name: str = "ff"
    d_ff: int
    activation: Activation
    gated: bool = False
    bias: bool = True
    # the field of the config that sets d_ff
    d_ff_field: str = "d_ff"

    @property
    def out_bias(self) -> bool:
        """See `Mechanism`."""
        return self.bias

    @property
    def sizes(self) -> tuple[tuple[str, Size], ...]:
        """See `Mechanism`."""
        return (("mlp", Size(f"model.{self.d_ff_field}", self.d_ff)),)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The maps of x."""
        return ("in", "gate") if self.gated else ("in",)

    def arrays(self, width: int) -> Arrays:
        """See `Mechanism`."""
        arrays: Arrays = {}
        for name in self.inputs:
            arrays |= below(name, linear(("embed", "mlp"), width, self.d_ff, "input", bias=self.bias))
        return arrays | below("out", linear(("mlp", "embed"), self.d_ff, width, "output"))


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Which experts a token goes to, and with which weights, in float32.

    A token has a score for each expert: the softmax, or the sigmoid, of x w, or of x w + b with `logit_bias`. It goes
    to the `chosen` experts with the greatest scores, and their outputs are weighted by these scores; with `normalize`,
    divided by their sum plus `eps`; then times `scale`. The softmax of the chosen logits (Mixtral) is the normalized
    softmax of all.

    With `bias`, a bias is added to the scores for the choice only (Wang et al. 2024, arXiv:2408.15664). With `groups`,
    a token chooses from the experts of the `top_groups` best groups (DeepSeek-V2, arXiv:2405.04434). The score of a
    group is its greatest score, or the sum of its two best scores, as `group_score` says.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    chosen: int
    normalize: bool
    eps: float = 0.0
    scale: float = 1.0
    bias: bool = False
    logit_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "two_best"] = "max"


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec(Mechanism):
    """`count` feed-forward layers like `Dense`. Each token goes through the experts that `router` chooses (Shazeer et
    al. 2017, arXiv:1701.06538).

    All tokens also go through `shared`; with `shared_gate`, its output is multiplied by sigmoid(x w).
    """

    name: str = "ff"
    count: int
    d_ff: int
    activation: Activation
    router: RouterSpec
    gated: bool = True
    bias: bool = False
    shared: Dense | None = None
    shared_gate: bool = False
    # the field of the config that sets d_ff
    d_ff_field: str = "expert_d_ff"

    @property
    def sizes(self) -> tuple[tuple[str, Size], ...]:
        """See `Mechanism`."""
        count, hidden = Size("model.n_experts", self.count), Size(f"model.{self.d_ff_field}", self.d_ff)
        return ("experts", count), ("mlp", hidden), *(self.shared.sizes if self.shared else ())

    def arrays(self, width: int) -> Arrays:
        """See `Mechanism`: the matrices of all experts, the shared feed-forward, and the router."""
        wide, narrow = (self.count, width, self.d_ff), (self.count, self.d_ff, width)
        used = self.router.chosen * width * self.d_ff
        into = Array(("experts", "embed", "mlp"), wide, used, "input", lecun_stddev(wide), dims="eio")
        out = Array(("experts", "mlp", "embed"), narrow, used, "output", lecun_stddev(narrow), dims="eio")
        names = ("gate", "in") if self.gated else ("in",)
        experts = {**dict.fromkeys(names, into), "out": out}
        if self.bias:
            experts |= {f"{name}_b": Array(("experts", "mlp"), (self.count, self.d_ff)) for name in names}
            experts["out_b"] = Array(("experts", "embed"), (self.count, width))
        arrays = below("experts", experts)
        if self.shared is not None:
            arrays |= below("shared", self.shared.arrays(width))
        if self.shared_gate:
            arrays |= below("shared_gate", linear(("embed", None), width, 1, "other"))
        arrays |= below("router", linear(("embed", None), width, self.count, "other", bias=self.router.logit_bias))
        if self.router.bias:
            arrays["router/bias"] = Array((None,), (self.count,))
        return arrays
