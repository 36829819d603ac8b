"""A decoder as plain data, without jax. A family's config returns a `Decoder`, which models/decoder.py builds."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mesh_transformer.fields import Size
from mesh_transformer.spec.attention import Attention, LatentAttention, Norm

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """activation(x w_in + b) w_out + b; gated: (activation(x w_gate + b) * (x w_in + b)) w_out + b (Shazeer 2020,
    arXiv:2002.05202)."""

    d_ff: int
    activation: Activation
    gated: bool = False
    bias: bool = True

    @property
    def token_width(self) -> int:
        """The hidden dims that a token goes through."""
        return self.d_ff


@dataclass(frozen=True, kw_only=True)
class Router:
    """Which experts a token goes to, and with which weights, in float32.

    A token has a score for each expert: the softmax, or the sigmoid, of x w. It goes to the `chosen` experts with the
    greatest scores, and their outputs are weighted by these scores; with `normalize`, divided by their sum plus `eps`;
    then times `scale`. The softmax of the chosen logits (Mixtral) is the normalized softmax of all.

    With `bias`, a bias is added to the scores for the choice only (Wang et al. 2024, arXiv:2408.15664). With `groups`,
    a token chooses from the experts of the `top_groups` best groups (DeepSeek-V2, arXiv:2405.04434): those with the
    greatest score, or the greatest sum of their two best scores, as `group_score` says.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    chosen: int
    normalize: bool
    eps: float = 0.0
    scale: float = 1.0
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "two_best"] = "max"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """`count` gated feed-forward layers without biases, of which each token goes through those that `router` chooses
    (Shazeer et al. 2017, arXiv:1701.06538).

    All tokens also go through `shared`; with `shared_gate`, its output is multiplied by sigmoid(x w).
    """

    count: int
    d_ff: int
    activation: Activation
    router: Router
    shared: Dense | None = None
    shared_gate: bool = False
    # the field of the config that sets d_ff
    d_ff_field: str = "expert_d_ff"

    @property
    def gated(self) -> bool:
        """See `Dense`."""
        return True

    @property
    def bias(self) -> bool:
        """See `Dense`."""
        return False

    @property
    def token_width(self) -> int:
        """The hidden dims that a token goes through: those of the chosen and of the shared experts."""
        return self.router.chosen * self.d_ff + (self.shared.d_ff if self.shared else 0)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Attention and feed-forward around a residual stream x.

    sequential: x += attention(norm(x)); x += ff(ff_norm(x)). parallel: x += attention(norm(x)) + ff(ff_norm(x)).
    parallel_one_norm: the same with ff(norm(x)). sandwich: x += attention_post_norm(attention(norm(x)));
    x += ff_post_norm(ff(ff_norm(x))). Experts need sequential or sandwich.
    """

    attention: Attention | LatentAttention
    ff: Dense | Experts
    norm: Norm
    wiring: Literal["sequential", "parallel", "parallel_one_norm", "sandwich"]

    @property
    def kind(self) -> "Layer":
        """The layer without its window. Layers of one kind have parameters of the same shapes."""
        return replace(self, attention=replace(self.attention, window=None))


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A whole model. The layers may differ in their windows, and some may have experts."""

    d_model: int
    n_vocab: int
    # the vocabulary tables are padded to a multiple of this number, whatever the mesh
    vocab_multiple: int
    # longest context
    seq: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    embed_bias: bool = False
    # the token embeddings are multiplied by this number
    embed_scale: float = 1.0
    learned_positions: bool = False
    # T5's, by head and bucket of distance, shared by all layers
    relative_bias: bool = False
    # the head uses the token embeddings as its weights
    tied: bool = False
    head_bias: bool = False
    # the logits become softcap * tanh(logits / softcap)
    softcap: float | None = None

    def __post_init__(self) -> None:
        assert len({replace(kind, ff=self.layer.ff) for kind in self.kinds}) == 1
        kinds = [type(kind.ff) for kind in self.kinds]
        assert len(kinds) == len(set(kinds))

    @functools.cached_property
    def layer(self) -> Layer:
        """The kind of the first layer. All layers are like it but for their windows and feed-forwards."""
        return self.layers[0].kind

    @functools.cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The kinds of layers: one, or one with a dense feed-forward and one with experts."""
        # many layers are one object: it is compared once
        distinct = {id(layer): layer for layer in self.layers}.values()
        return tuple(dict.fromkeys(layer.kind for layer in dict.fromkeys(distinct)))

    @functools.cached_property
    def experts(self) -> Experts | None:
        """The experts of the layers that have them."""
        return next((kind.ff for kind in self.kinds if isinstance(kind.ff, Experts)), None)

    @functools.cached_property
    def leading(self) -> int:
        """The dense layers at the beginning of a model whose other layers all have experts; 0 for any other model."""
        with_experts = self.layers_with(Experts)
        first = with_experts[0] if with_experts else 0
        return first if with_experts == tuple(range(first, len(self.layers))) else 0

    def stack_axis(self, layers: Sequence[int]) -> str:
        """The name of the first dimension of arrays that are stacked over these layers. The stages of a pipeline share
        out the layers after the `leading` ones."""
        return "layers" if tuple(layers) == tuple(range(self.leading, len(self.layers))) else "unsplit_layers"

    def layers_with(self, ff: type[Dense | Experts]) -> tuple[int, ...]:
        """The layers whose feed-forward is of a type, ascending."""
        return tuple(number for number, layer in enumerate(self.layers) if isinstance(layer.ff, ff))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; none if no layer has one."""
        windows = tuple(layer.attention.window for layer in self.layers)
        return windows if any(windows) else ()

    @property
    def padded_vocab(self) -> int:
        """Rows of the vocabulary tables, with their padding."""
        return -(-self.n_vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def sizes(self) -> dict[str, list[Size]]:
        """The sizes of the model's named dimensions of parameters and activations, with the fields that set them."""
        width, experts = [Size("model.d_model", self.d_model)], self.experts
        hidden = [Size("model.d_ff", kind.ff.d_ff) for kind in self.kinds if isinstance(kind.ff, Dense)]
        if experts is not None:
            hidden.append(Size(f"model.{experts.d_ff_field}", experts.d_ff))
            if experts.shared is not None:
                hidden.append(Size("model.shared_d_ff", experts.shared.d_ff))
        layers = Size("model.layers", len(self.layers))
        if self.leading:
            layers = Size("the number of layers with experts", len(self.layers) - self.leading)
        return {
            "act_embed": width,
            "layers": [layers],
            "embed": width,
            "heads": [Size("model.n_heads", self.layer.attention.heads)],
            "mlp": hidden,
            "experts": [] if experts is None else [Size("model.n_experts", experts.count)],
            "vocab": [Size("model.n_vocab", self.n_vocab, "model.vocab_multiple", self.vocab_multiple)],
        }
