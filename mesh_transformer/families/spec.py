"""A family as plain data without jax: what its decoder is made of, and which tensors of other programs' files are its parameters.

A family's config gives one `Decoder`; models/decoder.py builds it. `Tensor` is a row of a table that the readers and writers of
foreign checkpoints go through.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mesh_transformer.fields import Size

TRANSPOSED = "f d -> d f"


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A normalisation, computed in float32.

    layer: (x - mean) / standard deviation. length: x / (|x| + eps), whose scale starts at sqrt(d_model): the classic
    rmsnorm, and with `one_scale` scalenorm (Nguyen and Salazar 2019).
    """

    kind: Literal["layer", "length"] = "layer"
    eps: float = 1e-5
    offset: bool = True
    one_scale: bool = False


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position encoding (Su et al. 2021, arXiv:2104.09864) of the first `dims` of each head.

    pairs: dims (0, 1), (2, 3) ... are rotated together (GPT-J); halves: dims i and i + dims / 2 (GPT-NeoX). `precision` is
    that of position * frequency: transformers has float32, the original GPT-J float64.
    """

    dims: int
    style: Literal["pairs", "halves"]
    base: float = 10000.0
    precision: Literal["float32", "float64"] = "float32"


class CacheEntry(NamedTuple):
    """One array that attention keeps of a position: (heads, width), and the name of its first dimension."""

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
        """What a position leaves behind for later ones: its keys and its values."""
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
    """A whole model. `layers` are equal in the shapes of their parameters."""

    d_model: int
    n_vocab: int
    vocab_multiple: int  # the tables get unused rows up to a multiple of this, whatever the mesh
    seq: int  # longest context
    layers: tuple[Layer, ...]
    final_norm: Norm
    embed_bias: bool = False
    learned_positions: bool = False
    relative_bias: bool = False  # T5's: by head and bucket of distance, the same in all layers
    tied: bool = False  # the head multiplies by the table of embeddings
    head_bias: bool = False

    @property
    def padded_vocab(self) -> int:
        """Rows of the vocabulary tables."""
        return -(-self.n_vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def sizes(self) -> dict[str, list[Size]]:
        """The named dimensions of parameters and activations that the model gives, each with the field for its size."""
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
    """How the m arrays of a classic checkpoint make up the whole one."""

    ROWS = "concatenated along the first dimension"
    COLUMNS = "concatenated along the last dimension"
    SUM = "added up: a bias added on every shard before the sum over shards"
    FIRST = "the first shard's; the others' are never used"
    MEAN = "averaged"
    UNUSED = "stored by the original and used by nothing; of the shape of `ours`, which it is not"
    COUNT = "an int32 scalar, the same in every shard"


class Tensor(NamedTuple):
    """A row: which tensor of theirs holds one of our parameters.

    A row under blocks/ stands for all layers: ours has a leading dimension of layers, they have one tensor a layer.
    Shapes are not in the table: they are those of the model's parameters.
    """

    ours: str  # below params/
    theirs: str  # with {} for the layer
    # einops, from theirs to ours, read backwards to write; with `part` it yields "part ..."
    view: str | None = None
    part: int | None = None  # where one of theirs holds several of ours: which of them
    sizes: Mapping[str, int] = {}  # that `view` needs; "part": how many
    vocab_axis: int | None = None  # the dimension of ours that is padded; theirs is not
    # one of ours that they lack: zeros where theirs is read, added to the rows to write it
    bias: str | None = None
    tied: str | None = None  # the tensor of theirs that is this one too, where config.json ties the head
    copy: str | None = None  # a tensor of theirs that may lie beside this one, and is its equal
    split: Split = Split.ROWS  # in classic shards

    @property
    def stacked(self) -> bool:
        """Whether ours has a leading dimension of layers."""
        return self.ours.startswith("blocks/")
