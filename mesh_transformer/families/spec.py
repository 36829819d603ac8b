"""A family as plain data, without jax: the parts of its decoder, and the tensors of other programs that hold its
parameters.

A family's config returns a `Decoder`, which models/decoder.py builds. A `Tensor` is a row of the table by which foreign
checkpoints are read and written.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mesh_transformer.fields import Size

TRANSPOSED = "f d -> d f"


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A normalization, computed in float32.

    layer: (x - mean) / standard deviation. length: x / (|x| + eps), with a scale that starts at sqrt(d_model): the
    classic rmsnorm, or scalenorm (Nguyen and Salazar 2019) with `one_scale`.
    """

    kind: Literal["layer", "length"] = "layer"
    eps: float = 1e-5
    offset: bool = True
    one_scale: bool = False


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


class CacheEntry(NamedTuple):
    """One array that the cache holds for a position: its shape (heads, width), and the name of its first dimension."""

    name: str
    heads: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Multi-head attention; `bias` is on q, k and v, `out_bias` on the output."""

    heads: int
    head_dim: int
    rotary: Rotary | None
    bias: bool = False
    out_bias: bool = False

    @property
    def cache_entries(self) -> tuple[CacheEntry, ...]:
        """What the cache holds for each position: keys and values."""
        entry = CacheEntry("heads", self.heads, self.head_dim)
        return entry, entry


@dataclass(frozen=True, kw_only=True)
class Dense:
    """activation(x w_in + b) w_out + b."""

    d_ff: int
    activation: Literal["gelu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Attention and feed-forward around a residual stream x.

    sequential: x += attention(norm(x)); x += ff(ff_norm(x)). parallel: x += attention(norm(x)) + ff(ff_norm(x)).
    parallel_one_norm: the same with ff(norm(x)).
    """

    attention: Attention
    ff: Dense
    norm: Norm
    wiring: Literal["sequential", "parallel", "parallel_one_norm"]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A whole model. All `layers` have parameters of the same shapes."""

    d_model: int
    n_vocab: int
    # the vocabulary tables are padded to a multiple of this number, whatever the mesh
    vocab_multiple: int
    # longest context
    seq: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    embed_bias: bool = False
    learned_positions: bool = False
    # T5's, by head and bucket of distance, shared by all layers
    relative_bias: bool = False
    # the head uses the token embeddings as its weights
    tied: bool = False
    head_bias: bool = False

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
            "heads": [Size("model.n_heads", self.layers[0].attention.heads)],
            "mlp": [Size("model.d_ff", self.layers[0].ff.d_ff)],
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
