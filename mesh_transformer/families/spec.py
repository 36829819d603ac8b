"""A family as plain data, without jax: the parts of its decoder, and the tensors of other programs that hold its
parameters.

A family's config returns a `Decoder`, which models/decoder.py builds. A `Tensor` is a row of the table by which foreign
checkpoints are read and written.
"""

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mesh_transformer.fields import Size

TRANSPOSED = "f d -> d f"
Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A normalization, computed in float32.

    layer: (x - mean) / sqrt(variance + eps). rms: x / sqrt(mean of x^2 + eps) (Zhang and Sennrich 2019,
    arXiv:1910.07467). length: x / (|x| + eps), with a scale that starts at sqrt(d_model): the classic rmsnorm, or
    scalenorm (Nguyen and Salazar 2019) with `one_scale`. With `plus_one` the scale is 1 + the parameter.
    """

    kind: Literal["layer", "rms", "length"] = "layer"
    eps: float = 1e-5
    offset: bool = True
    one_scale: bool = False
    plus_one: bool = False


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How the frequencies of rotary encoding are lowered for contexts that are longer than `original_seq`.

    linear: all by `factor` (Chen et al. 2023, arXiv:2306.15595). llama3: only the low ones, those with fewer than
    `low_freq_factor` turns in `original_seq` positions; those with more than `high_freq_factor` turns stay (Llama 3.1).
    yarn: the same with a ramp from `beta_slow` to `beta_fast` turns, and sines and cosines are multiplied by
    `attention_factor` (Peng et al. 2023, arXiv:2309.00071).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_seq: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # the ends of yarn's ramp are whole numbers of dims
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position encoding (Su et al. 2021, arXiv:2104.09864) of the first `dims` of each head.

    pairs: dims (0, 1), (2, 3) ... are rotated together (GPT-J); halves: dims i and i + dims / 2 (GPT-NeoX). `precision`
    is that of position * frequency: float32 in transformers, float64 in the original GPT-J.
    """

    dims: int
    style: Literal["pairs", "halves"]
    base: float = 10000.0
    precision: Literal["float32", "float64"] = "float32"
    scaling: Scaling | None = None


class CacheEntry(NamedTuple):
    """One array that the cache holds for a position: its shape (heads, width), and the name of its first dimension."""

    name: str
    heads: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention with `kv_heads` keys and values: heads / kv_heads queries share one (Ainslie et al. 2023,
    arXiv:2305.13245).

    `bias` is on q, k and v, `out_bias` on the output. `qk_norm` normalizes each head of q and k before the rotation. A
    query sees the last `window` keys, up to its own; None: all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary | None
    # of the products of queries and keys; None: 1 / sqrt(head_dim)
    scale: float | None = None
    bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None
    # the scaled products become softcap * tanh(products / softcap)
    softcap: float | None = None
    window: int | None = None

    @property
    def kv_name(self) -> str:
        """The name of the dimension of the keys' and values' heads."""
        return "heads" if self.kv_heads == self.heads else "kv_heads"

    @property
    def cache_entries(self) -> tuple[CacheEntry, ...]:
        """What the cache holds for each position: keys and values."""
        entry = CacheEntry(self.kv_name, self.kv_heads, self.head_dim)
        return entry, entry


@dataclass(frozen=True, kw_only=True)
class Dense:
    """activation(x w_in + b) w_out + b; gated: (activation(x w_gate + b) * (x w_in + b)) w_out + b (Shazeer 2020,
    arXiv:2002.05202)."""

    d_ff: int
    activation: Activation
    gated: bool = False
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Attention and feed-forward around a residual stream x.

    sequential: x += attention(norm(x)); x += ff(ff_norm(x)). parallel: x += attention(norm(x)) + ff(ff_norm(x)).
    parallel_one_norm: the same with ff(norm(x)). sandwich: x += attention_post_norm(attention(norm(x)));
    x += ff_post_norm(ff(ff_norm(x))).
    """

    attention: Attention
    ff: Dense
    norm: Norm
    wiring: Literal["sequential", "parallel", "parallel_one_norm", "sandwich"]

    @property
    def kind(self) -> "Layer":
        """The layer without its window: the layers of a decoder may differ only in it."""
        return replace(self, attention=replace(self.attention, window=None))


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A whole model. All `layers` are of one kind."""

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
        assert {layer.kind for layer in self.layers} == {self.layer}

    @functools.cached_property
    def layer(self) -> Layer:
        """The kind of all layers."""
        return self.layers[0].kind

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
        width = [Size("model.d_model", self.d_model)]
        return {
            "act_embed": width,
            "layers": [Size("model.layers", len(self.layers))],
            "embed": width,
            "heads": [Size("model.n_heads", self.layer.attention.heads)],
            "mlp": [Size("model.d_ff", self.layer.ff.d_ff)],
            "vocab": [Size("model.n_vocab", self.n_vocab, "model.vocab_multiple", self.vocab_multiple)],
        }


class Split(enum.Enum):
    """How the arrays of a classic checkpoint's shards make up the whole array."""

    ROWS = "concatenated along the first dimension"
    COLUMNS = "concatenated along the last dimension"
    SUM = "summed: a bias that every shard adds before the sum over shards"
    FIRST = "that of the first shard; the original never uses the others"
    MEAN = "averaged"
    UNUSED = "stored by the original but never used; it has the shape of `parameter` but is another array"
    COUNT = "an int32 scalar, the same in every shard"


class Tensor(NamedTuple):
    """A row of a table: a parameter of this program and the tensor of a foreign format that holds it.

    A row under blocks/ stands for all layers: the parameter has a leading dimension of layers, and the foreign format
    has one tensor per layer. The table has no shapes: they follow from the parameters of the model.
    """

    # path of the parameter below params/
    parameter: str
    # name of the foreign tensor, with {} for the number of the layer
    foreign: str
    # einops pattern from the foreign tensor to the parameter, inverted for writing; with `part` the result begins with
    # the dimension `part`
    view: str | None = None
    # index of the parameter in the foreign tensor, if that holds several parameters
    part: int | None = None
    # the sizes that `view` needs; "part": the number of parameters in the foreign tensor
    sizes: Mapping[str, int] = {}
    # the dimension that is padded in the parameter, and not in the foreign tensor
    vocab_axis: int | None = None
    # another parameter, without a foreign tensor: it is read as zeros, and writing adds it to the rows of this one
    bias: str | None = None
    # the foreign tensor to read instead, if config.json ties the head
    tied: str | None = None
    # a foreign tensor that may be stored too, and is then equal to this one
    copy: str | None = None
    # how classic shards split it
    split: Split = Split.ROWS

    @property
    def stacked(self) -> bool:
        """Whether the parameter has a leading dimension of layers."""
        return self.parameter.startswith("blocks/")
