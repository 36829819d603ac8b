"""Haiku modules shared by the model families. They name their parameters' dimensions and nothing else.

Shapes: B sequences, T positions, D residual width, H heads, K dims of a head, F feed-forward width,
V vocabulary rows. Parameters are float32 and are cast to the compute dtype before `apply`.
"""

from __future__ import annotations

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.ops.attention import attend, causal_attend, t5_buckets
from mesh_transformer.ops.cache import Keys
from mesh_transformer.ops.linear import add_bias, matmul
from mesh_transformer.ops.rotary import angles, rotate
from mesh_transformer.parallel.sharding import constrain, with_axes

_zeros = hk.initializers.Constant(0.0)
_gelu = jax.checkpoint(
    functools.partial(jax.nn.gelu, approximate=True)
)  # else five tensors of its size are kept


def _parameter(
    name: str, shape: tuple[int, ...], init: hk.initializers.Initializer, *axes: str | None
) -> jax.Array:
    return hk.get_parameter(name, shape, jnp.float32, init=with_axes(init, *axes))


class Linear(hk.Module):
    """x @ w (+ b): (..., D_in) -> (..., D_out), weights truncated normal with `stddev` (1/sqrt(D_in) if absent)."""

    def __init__(
        self,
        d_out: int,
        axes: tuple[str, str],
        *,
        bias: bool = False,
        stddev: float | None = None,
        name: str,
    ):
        super().__init__(name)
        self.d_out, self.axes, self.bias, self.stddev = d_out, axes, bias, stddev

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        d_in = x.shape[-1]
        init = hk.initializers.TruncatedNormal(self.stddev or 1 / np.sqrt(d_in))
        y = matmul(x, _parameter("w", (d_in, self.d_out), init, *self.axes), out_dtype or x.dtype)
        return add_bias(y, _parameter("b", (self.d_out,), _zeros, self.axes[1])) if self.bias else y


class Bias(hk.Module):
    """x + b, for a bias that must be added after a sum over tensor-parallel shards. (B, T, D)."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return add_bias(x_BTD, _parameter("b", x_BTD.shape[-1:], _zeros, "embed"))


class Embedding(hk.Module):
    """Rows of a vocabulary table, plus a bias: tokens (B, T) -> (B, T, D)."""

    def __init__(self, rows: int, d_model: int, stddev: float, name: str):
        super().__init__(name)
        self.rows, self.d_model, self.stddev = rows, d_model, stddev

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        init = hk.initializers.TruncatedNormal(self.stddev)
        w_VD = _parameter("w", (self.rows, self.d_model), init, "vocab", "embed")
        x_BTD = constrain(jnp.take(w_VD, tokens_BT, axis=0), "batch", "seq", "act_embed")
        return add_bias(x_BTD, _parameter("b", (self.d_model,), _zeros, "embed"))


class PositionTable(hk.Module):
    """A learned vector for each position, added to the embedding: positions (B, T) -> (B, T, D)."""

    def __init__(self, n_positions: int, d_model: int, name: str):
        super().__init__(name)
        self.shape = (n_positions, d_model)

    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        table = _parameter("w", self.shape, hk.initializers.TruncatedNormal(0.02), None, "embed")
        return jnp.take(table, positions_BT, axis=0)


class T5Bias(hk.Module):
    """A learned bias for each head and bucket of distances: positions (B, T), of keys (B, S) -> (B, H, T, S)."""

    def __init__(self, n_heads: int, n_positions: int, name: str):
        super().__init__(name)
        self.n_heads, self.bucket_of = n_heads, t5_buckets(n_positions)

    def __call__(self, positions_BT: jax.Array, keys_BS: jax.Array) -> jax.Array:
        init = hk.initializers.TruncatedNormal(0.02)
        table_HN = _parameter("w", (self.n_heads, 32), init, "heads", None)
        distance = positions_BT[:, :, None] - keys_BS[:, None]
        distance = jnp.clip(distance, 0, len(self.bucket_of) - 1)
        bias_HBTS = jnp.take(table_HN, jnp.asarray(self.bucket_of)[distance], axis=1)
        return rearrange(bias_HBTS, "h b t s -> b h t s")


class Norm(hk.Module):
    """The classic normalisations, in float32; the result has x's dtype. (..., D) -> (..., D).

    layernorm: epsilon 1e-5, biased variance; layernorm-nobias: without offset. rmsnorm: x / (|x| + 1e-5) times
    a scale that starts at sqrt(D) (the norm, not the mean square); scalenorm: the same with one scale for
    all dims (Nguyen and Salazar 2019); "-bias" adds an offset of the scale's shape.
    """

    def __init__(self, kind: str, name: str):
        super().__init__(name)
        self.kind = kind

    def __call__(self, x: jax.Array) -> jax.Array:
        d_model, x32 = x.shape[-1], x.astype(jnp.float32)
        if self.kind.startswith("layernorm"):
            centred = x32 - x32.mean(-1, keepdims=True)
            y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
            start, offset = 1.0, self.kind == "layernorm"
        else:
            y = x32 / (jnp.sqrt(jnp.square(x32).sum(-1, keepdims=True)) + 1e-5)
            start, offset = np.sqrt(d_model), self.kind.endswith("-bias")
        shape: tuple[int, ...] = () if self.kind.startswith("scalenorm") else (d_model,)
        axes = ("embed",) * len(shape)
        y = y * _parameter("scale", shape, hk.initializers.Constant(start), *axes)
        if offset:
            y = y + _parameter("offset", shape, _zeros, *axes)
        return y.astype(x.dtype)


def at_position(x_BTD: jax.Array, index_B: jax.Array) -> jax.Array:
    """One position of each sequence: (B, T, ...) and int32 indices into T -> (B, 1, ...)."""
    return jax.vmap(lambda x_TD, index: jax.lax.dynamic_slice_in_dim(x_TD, index, 1))(x_BTD, index_B)


class Attention(hk.Module):
    """Causal self-attention without biases and without its sum over shards: (B, T, D) -> (B, T, D).

    With a cache, the keys and values of these T positions are written to it at `layer` and the queries attend
    to everything in it up to their own position. With `only_B` there is one query a sequence: (B, 1, D).
    """

    def __init__(
        self, n_heads: int, d_head: int, rotary: tuple[int, int] | None, out_stddev: float, name: str
    ):
        super().__init__(name)
        self.n_heads, self.d_head, self.out_stddev = n_heads, d_head, out_stddev
        self.angles = angles(*rotary) if rotary else None  # rotary: (positions, dims)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        bias_BHTS: jax.Array | None,
        cache: Keys | None,
        layer: jax.Array,
        only_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Keys | None]:
        x_q, positions_q = x_BTD, positions_BT
        if only_B is not None:
            x_q, positions_q = at_position(x_BTD, only_B), at_position(positions_BT, only_B)
            if bias_BHTS is not None:
                bias_BHTS = at_position(bias_BHTS.swapaxes(1, 2), only_B).swapaxes(1, 2)
        q, k, v = (self._heads(x, name) for name, x in (("q", x_q), ("k", x_BTD), ("v", x_BTD)))
        q, k = self._rotated(q, positions_q), self._rotated(k, positions_BT)
        if cache is None:
            mixed = causal_attend(q, k, v, bias_BHTS)
        else:
            cache = cache.write(layer, positions_BT, k, v)
            mask = cache.mask(positions_q)
            mixed = attend(q, cache.read(layer), mask, bias_BHTS, triangular=cache.triangular)
        mixed = constrain(mixed, "batch", "seq", "heads", None)
        mixed = checkpoint_name(mixed, "attn_out")
        d_model = x_BTD.shape[-1]
        o = Linear(d_model, ("heads", "embed"), stddev=self.out_stddev, name="o")
        return o(rearrange(mixed, "b t h k -> b t (h k)")), cache

    @hk.transparent
    def _heads(self, x_BTD: jax.Array, name: str) -> jax.Array:
        y = Linear(self.n_heads * self.d_head, ("embed", "heads"), name=name)(x_BTD)
        return constrain(rearrange(y, "b t (h k) -> b t h k", k=self.d_head), "batch", "seq", "heads", None)

    def _rotated(self, x_BTHK: jax.Array, positions_BT: jax.Array) -> jax.Array:
        if self.angles is None:
            return x_BTHK
        return rotate(x_BTHK, *(jnp.asarray(table)[positions_BT] for table in self.angles))


class FeedForward(hk.Module):
    """gelu(x w_in + b) w_out, the tanh gelu, without the output's bias and its sum over shards."""

    def __init__(self, d_ff: int, out_stddev: float, name: str):
        super().__init__(name)
        self.d_ff, self.out_stddev = d_ff, out_stddev

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        hidden = Linear(self.d_ff, ("embed", "mlp"), bias=True, name="in")(x_BTD)
        hidden = checkpoint_name(constrain(hidden, "batch", "seq", "mlp"), "mlp_hidden")
        out = Linear(x_BTD.shape[-1], ("mlp", "embed"), stddev=self.out_stddev, name="out")
        return out(_gelu(hidden))
