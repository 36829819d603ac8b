"""Attention as plain data, with the norms and the rotary encoding that it has."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


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
    is that of position * frequency: float32 in transformers, float64 in the original GPT-J. With an odd number of dims,
    one dim more is rotated.
    """

    dims: int
    style: Literal["pairs", "halves"]
    base: float = 10000.0
    precision: Literal["float32", "float64"] = "float32"
    scaling: Scaling | None = None


class CacheEntry(NamedTuple):
    """One array that the cache holds for a position: its shape (heads, width), and the name of its first dimension."""

    name: str | None
    heads: int
    width: int


class Matrix(NamedTuple):
    """A matrix of a layer: the names and sizes of its dimensions, the outputs last, and whether it has a bias."""

    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention with `kv_heads` keys and values: heads / kv_heads queries share one (Ainslie et al. 2023,
    arXiv:2305.13245).

    `bias` is on q, k and v, `out_bias` on the output. `qk_norm` normalizes each head of q and k before the rotation; with
    `qk_norm_whole`, all heads of q together, and all of k. Then q, k and v are limited to values from -clip to clip. A
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
    qk_norm_whole: bool = False
    clip: float | None = None
    # the scaled products become softcap * tanh(products / softcap)
    softcap: float | None = None
    window: int | None = None

    @property
    def kv_name(self) -> str:
        """The name of the dimension of the keys' and values' heads."""
        return "heads" if self.kv_heads == self.heads else "kv_heads"

    @property
    def v_dims(self) -> int:
        """The width of a head of values."""
        return self.head_dim

    @property
    def keys_and_values(self) -> tuple[CacheEntry, CacheEntry]:
        """What attention multiplies of each position."""
        entry = CacheEntry(self.kv_name, self.kv_heads, self.head_dim)
        return entry, entry

    @property
    def cache_entries(self) -> tuple[CacheEntry, ...]:
        """What the cache holds for each position: keys and values."""
        return self.keys_and_values

    def matrices(self, d_model: int) -> list[Matrix]:
        """q, k, v and, last, the output. The bias of the output is not in it."""
        maps = ("heads", self.heads), (self.kv_name, self.kv_heads), (self.kv_name, self.kv_heads)
        inputs = [Matrix(("embed", axis), (d_model, heads * self.head_dim), self.bias) for axis, heads in maps]
        return [*inputs, Matrix(("heads", "embed"), (self.heads * self.head_dim, d_model))]

    @property
    def norms(self) -> list[tuple[Norm, str | None, int]]:
        """Each norm, with the name and the size of the dimension that it normalizes."""
        if self.qk_norm is None:
            return []
        if not self.qk_norm_whole:
            return [(self.qk_norm, None, self.head_dim)] * 2
        maps = ("heads", self.heads), (self.kv_name, self.kv_heads)
        return [(self.qk_norm, axis, heads * self.head_dim) for axis, heads in maps]


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Keys and values of all heads are made from one latent of `kv_rank` dims, which `norm` normalizes. A head of q and k
    has `nope_dims` dims without rotation and then `rotary.dims` rotated ones, which in k are the same for all heads. A
    head of values has `v_dims` dims. q is made from a normalized latent of `q_rank` dims, or from x if this is None.
    `bias` is on the maps from x to the latents, and on the output. `scale` and `window` are as in `Attention`.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dims: int
    v_dims: int
    rotary: Rotary
    norm: Norm
    scale: float | None = None
    bias: bool = False
    window: int | None = None

    @property
    def head_dim(self) -> int:
        """The width of a head of q and k."""
        return self.nope_dims + self.rotary.dims

    @property
    def kv_heads(self) -> int:
        """The heads of keys and values."""
        return self.heads

    @property
    def kv_name(self) -> str:
        """The name of their dimension."""
        return "heads"

    @property
    def out_bias(self) -> bool:
        """See `Attention`."""
        return self.bias

    @property
    def keys_and_values(self) -> tuple[CacheEntry, CacheEntry]:
        """See `Attention`."""
        return CacheEntry("heads", self.heads, self.head_dim), CacheEntry("heads", self.heads, self.v_dims)

    @property
    def cache_entries(self) -> tuple[CacheEntry, ...]:
        """What the cache holds for each position: the latent, and the rotated dims of the key, which all heads share."""
        return (CacheEntry(None, 1, self.kv_rank + self.rotary.dims),)

    def matrices(self, d_model: int) -> list[Matrix]:
        """See `Attention`."""
        width, latent = self.heads * self.head_dim, self.kv_rank + self.rotary.dims
        queries = [Matrix(("embed", "heads"), (d_model, width))]
        if self.q_rank is not None:
            down = Matrix(("embed", None), (d_model, self.q_rank), self.bias)
            queries = [down, Matrix((None, "heads"), (self.q_rank, width))]
        return [
            *queries,
            Matrix(("embed", None), (d_model, latent), self.bias),
            Matrix(("heads", None, None), (self.heads, self.kv_rank, self.nope_dims + self.v_dims)),
            Matrix(("heads", "embed"), (self.heads * self.v_dims, d_model)),
        ]

    @property
    def norms(self) -> list[tuple[Norm, str | None, int]]:
        """See `Attention`."""
        return [(self.norm, None, rank) for rank in (self.q_rank, self.kv_rank) if rank is not None]
