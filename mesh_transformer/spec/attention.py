"""Attention as plain data."""

from dataclasses import dataclass
from typing import Literal

from mesh_transformer.spec.arrays import Array, Arrays, below, linear, matrix
from mesh_transformer.spec.mechanism import AttentionMixer, CacheEntry
from mesh_transformer.spec.norm import NormSpec
from mesh_transformer.spec.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(AttentionMixer):
    """Attention with `kv_heads` keys and values: heads / kv_heads queries share one (Ainslie et al. 2023,
    arXiv:2305.13245).

    `bias` is on q, k and v, `out_bias` on the output. `qk_norm` normalizes each head of q and k before the rotation
    ("heads") or after it ("rotated_heads"), or all heads of q together, and all of k, before it ("whole"). Before the
    rotation, q, k and v are limited to values from -clip to clip.
    """

    kv_heads: int
    head_dim: int
    bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_at: Literal["whole", "heads", "rotated_heads"] = "heads"
    clip: float | None = None
    # the scaled products become softcap * tanh(products / softcap)
    softcap: float | None = None

    @property
    def kv_name(self) -> str:
        """The name of the dimension of the keys' and values' heads."""
        return "heads" if self.kv_heads == self.heads else "kv_heads"

    @property
    def keys_and_values(self) -> tuple[CacheEntry, CacheEntry]:
        """See `AttentionMixer`."""
        added = 0 if self.positions is None else self.positions.added_dims
        key, value = (CacheEntry(self.kv_name, self.kv_heads, self.head_dim + more) for more in (added, 0))
        return key, value

    @property
    def maps(self) -> tuple[tuple[str, str, int], ...]:
        """The maps of x, in the order in which the module gets their products: name, dimension name of the product,
        and number of heads in it. A subclass may add some after these."""
        return ("q", "heads", self.heads), ("k", self.kv_name, self.kv_heads), ("v", self.kv_name, self.kv_heads)

    def arrays(self, width: int) -> Arrays:
        """See `Mechanism`: the arrays of `maps`, the output o, and the norms of q and k."""
        arrays: dict[str, Array] = {}
        for name, axis, heads in self.maps:
            arrays |= below(name, linear(("embed", axis), width, heads * self.head_dim, "input", bias=self.bias))
            if self.qk_norm is not None and name in ("q", "k"):
                over = (axis, heads * self.head_dim) if self.qk_norm_at == "whole" else (None, self.head_dim)
                arrays |= below(f"{name}_norm", self.qk_norm.arrays(*over))
        return arrays | below("o", linear(("heads", "embed"), self.heads * self.head_dim, width, "output"))


@dataclass(frozen=True, kw_only=True)
class FromLatentsSpec(AttentionMixer):
    """Attention to keys and values that are made of one latent of `kv_rank` dims of each position, for all heads.

    A head of q and k has `nope_dims` dims without rotation and then `rotary_dims` rotated dims; all heads of k share
    the rotated dims. A head of values has `v_dims` dims. The cache holds the latents and the rotated dims of the keys.
    """

    kv_rank: int
    nope_dims: int
    v_dims: int

    @property
    def rotary_dims(self) -> int:
        """The rotated dims of a head."""
        raise NotImplementedError

    @property
    def head_dim(self) -> int:
        """The width of a head of q and k."""
        return self.nope_dims + self.rotary_dims

    @property
    def keys_and_values(self) -> tuple[CacheEntry, CacheEntry]:
        """See `AttentionMixer`."""
        return CacheEntry("heads", self.heads, self.head_dim), CacheEntry("heads", self.heads, self.v_dims)

    @property
    def cache_entries(self) -> tuple[CacheEntry, ...]:
        """See `AttentionMixer`."""
        return (CacheEntry(None, 1, self.kv_rank + self.rotary_dims),)

    def _from_latents(self, width: int) -> Arrays:
        """The maps from the latent to the keys and values of all heads, and the output."""
        made = (self.heads, self.kv_rank, self.nope_dims + self.v_dims)
        return {
            "kv_b/w": matrix(("heads", None, None), made, "inner", "oio"),
            **below("o", linear(("heads", "embed"), self.heads * self.v_dims, width, "output")),
        }


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(FromLatentsSpec):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    `norm` normalizes the latent. The rotated key is made of x. q is made of a normalized latent of `q_rank` dims, or of
    x if this is None. `bias` is on the maps from x to the latents, and on the output.
    """

    positions: Rotary
    q_rank: int | None
    norm: NormSpec
    bias: bool = False

    @property
    def rotary_dims(self) -> int:
        """See `FromLatentsSpec`."""
        return self.positions.dims

    @property
    def out_bias(self) -> bool:
        """See `Mechanism`."""
        return self.bias

    def arrays(self, width: int) -> Arrays:
        """See `Mechanism`: the maps to the latents (q_a, kv_a) and from them (q_b, kv_b), and their norms."""
        queries, latent = self.heads * self.head_dim, self.kv_rank + self.rotary_dims
        if self.q_rank is None:
            q = below("q", linear(("embed", "heads"), width, queries, "input"))
        else:
            q = {
                **below("q_a", linear(("embed", None), width, self.q_rank, "input", bias=self.bias)),
                **below("q_norm", self.norm.arrays(None, self.q_rank)),
                **below("q_b", linear((None, "heads"), self.q_rank, queries, "inner")),
            }
        return {
            **q,
            **below("kv_a", linear(("embed", None), width, latent, "input", bias=self.bias)),
            **below("kv_norm", self.norm.arrays(None, self.kv_rank)),
            **self._from_latents(width),
        }


@dataclass(frozen=True, kw_only=True)
class JointLatentAttentionSpec(FromLatentsSpec):
    """The latent attention of JAXformer (Makkar et al. 2025): no norm of a latent, and biases on all maps.

    The rotated dims of q and k are made from both latents together: the one of q, of `q_rank` dims, and the one of keys
    and values. `positions` encodes the queries of all heads together, as if they were one head: a head has
    positions.dims / heads of its dims, and k the angles of every heads-th pair. So queries and keys turn at other
    rates, and attention depends on more than distances. Without `positions`, no dims are rotated.
    """

    positions: Rotary | None
    q_rank: int

    @property
    def rotary_dims(self) -> int:
        """See `FromLatentsSpec`."""
        return self.positions.dims // self.heads if self.positions else 0

    @property
    def out_bias(self) -> bool:
        """See `Mechanism`."""
        return True

    def arrays(self, width: int) -> Arrays:
        """See `Mechanism`: the maps to the latents (q_a, kv_a), and from them (q_b, kv_b; q_r, k_r)."""
        both, made = self.q_rank + self.kv_rank, self.heads * (self.nope_dims + self.v_dims)
        arrays = {
            **below("q_a", linear(("embed", None), width, self.q_rank, "input", bias=True)),
            **below("kv_a", linear(("embed", None), width, self.kv_rank, "input", bias=True)),
            **below("q_b", linear((None, "heads"), self.q_rank, self.heads * self.nope_dims, "inner", bias=True)),
        }
        if self.positions:
            arrays |= below("q_r", linear((None, "heads"), both, self.positions.dims, "inner", bias=True))
            arrays |= below("k_r", linear((None, None), both, self.rotary_dims, "inner", bias=True))
        return {**arrays, **self._from_latents(width), "kv_b/b": Array(("heads",), (made,))}
