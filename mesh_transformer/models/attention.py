"""Attention of a block, as Haiku modules.

Shapes: B sequences, T positions, H heads, J heads of keys and values, K dims of a head of keys, V of values, R of a
latent.
"""

from __future__ import annotations

from collections.abc import Sequence

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from mesh_transformer import spec
from mesh_transformer.models.modules import Context, Linear, Norm, columns, parameter
from mesh_transformer.ops.attend.cached import Cached
from mesh_transformer.ops.forms import FormMatrix
from mesh_transformer.ops.linear import Matrix, add_bias, column, dense
from mesh_transformer.ops.positions import ENCODINGS, Rotation, rotate
from mesh_transformer.parallel.sharding import constrain


class Attention:
    """The core of self-attention (`spec.AttentionSpec`). It gets q (B, T or 1, H K), k and v (B, T, J K) after their
    projections `inputs`, and returns the input of the projection `out`, (B, T or 1, H K). The products of further
    `maps` in a subclass of `spec.AttentionSpec` follow v."""

    def __init__(self, attention: spec.AttentionSpec, d_model: int, out_stddev: float, name: str):
        a, self.attention, self.name = attention, attention, name
        arrays = spec.with_outputs(a.arrays(d_model), out_stddev)
        # all modules in one scope: Haiku would number a second scope of the same name
        with hk.name_scope(name):
            self.inputs = [Linear.of(arrays, name) for name, _, _ in a.maps]
            self.out = Linear.of(arrays, "o")
            self.keys = self.inputs[1:3]
            self.qk_norms = []
            if a.qk_norm is not None:
                axes = ("heads", a.kv_name) if a.qk_norm_at == "whole" else (None, None)
                self.qk_norms = [Norm(a.qk_norm, f"{x}_norm", axis) for x, axis in zip("qk", axes, strict=True)]

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Context) -> jax.Array:
        # the name in profiles
        with jax.named_scope(self.name):
            return self._mixed(q, k, v, ctx)

    def _mixed(self, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Context) -> jax.Array:
        a = self.attention
        q, k, v = _products(ctx, q, k, v)
        if a.qk_norm_at == "whole":
            q, k = self._normed(q, k)
        q, k, v = self._heads(q, "heads"), self._heads(k, a.kv_name), self._heads(v, a.kv_name)
        if a.qk_norm_at == "heads":
            q, k = self._normed(q, k)
        if a.clip is not None:
            q, k, v = (jnp.clip(x, -a.clip, a.clip) for x in (q, k, v))
        scale = 1 / np.sqrt(a.head_dim) if a.scale is None else a.scale
        if a.positions and ctx.positions:
            of_queries = jax.tree.map(ctx.queries, ctx.positions)
            q, k = ENCODINGS[type(a.positions)].apply(a.positions, q, k, of_queries, ctx.positions, scale)
        if a.qk_norm_at == "rotated_heads":
            q, k = self._normed(q, k)
        mixed = ctx.attend(q, k, v, scale=scale, window=ctx.window, softcap=a.softcap)
        return rearrange(constrain(mixed, "batch", "seq", "heads", None), "b t h k -> b t (h k)")

    def _normed(self, q: jax.Array, k: jax.Array) -> list[jax.Array]:
        return [norm(x) for norm, x in zip(self.qk_norms, (q, k), strict=True)] if self.qk_norms else [q, k]

    def _heads(self, y: jax.Array, axis: str) -> jax.Array:
        return constrain(rearrange(y, "b t (h k) -> b t h k", k=self.attention.head_dim), "batch", "seq", axis, None)


class FromLatents:
    """Attention to keys and values that are made of latents (`spec.FromLatentsSpec`), given queries and latents.

    Whole sequences attend to keys and values of all heads, which are made from the latents. The cache holds the latents
    with the rotated keys. Few queries attend to these as to one head of keys and values that all heads share
    (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). The queries are first multiplied by the matrix that makes keys, and
    the mixed latents at last by the one that makes values. For many queries of a prompt, keys and values of all heads
    are made from the cache (`_makes_keys`).
    """

    def __init__(self, attention: spec.FromLatentsSpec, arrays: spec.Arrays):
        self.latents = attention
        self.kv_b = HeadMatrices(spec.inside("kv_b", arrays), name="kv_b")
        self.out = Linear.of(arrays, "o")

    def attend(
        self, ctx: Context, q_pass: jax.Array, q_rotated: jax.Array, latent: jax.Array, k_rotated: jax.Array
    ) -> jax.Array:
        """The input of `out`, (B, T or 1, H V), from the two parts of the queries, (B, T or 1, H, K) each, the latents
        (B, T, R) and the rotated keys (B, T, 1, K)."""
        k_rotated = constrain(k_rotated, "batch", "seq", None, None)
        if isinstance(ctx.attend, Cached) and ctx.attend.view.latent:
            entry = jnp.concatenate([constrain(latent, "batch", "seq", None)[:, :, None], k_rotated], axis=-1)
            mixed = self._from_cache(ctx.attend, q_pass, q_rotated, entry, ctx.window)
        else:
            mixed = self._made(ctx, q_pass, q_rotated, latent, k_rotated)
        return rearrange(constrain(mixed, "batch", "seq", "heads", None), "b t h v -> b t (h v)")

    def _made(
        self, ctx: Context, q_pass: jax.Array, q_rotated: jax.Array, latent: jax.Array, k_rotated: jax.Array
    ) -> jax.Array:
        """Attention to keys and values of all heads: (B, T or 1, H, V)."""
        (made,) = column(latent, [self.kv_b.of_all_heads], ["heads"])
        if self.kv_b.b is not None:
            made = add_bias(made, self.kv_b.b)
        k_pass, v = jnp.split(self._heads(made), [self.latents.nope_dims], axis=-1)
        k_rotated = jnp.broadcast_to(k_rotated, (*k_pass.shape[:-1], self.latents.rotary_dims))
        q, k = (jnp.concatenate(x, axis=-1) for x in ((q_pass, q_rotated), (k_pass, k_rotated)))
        return ctx.attend(q, k, v, scale=self._scale, window=ctx.window)

    def _from_cache(
        self,
        attend: Cached,
        q_pass: jax.Array,
        q_rotated: jax.Array,
        entry: jax.Array,
        window: jax.Array | int | None,
    ) -> jax.Array:
        """Attention to a cache of latents, (B, T or 1, H, V). `entry` (B, T, 1, R + rotary dims) is added to it."""
        stored = attend.update(entry)
        if self._makes_keys(q_pass.shape[1], attend.positions(stored)):
            q = jnp.concatenate([q_pass, q_rotated], axis=-1)
            return attend.attend(q, stored, scale=self._scale, window=window, make=self._keys_and_values)
        to_k, to_v = jnp.split(dense(self.kv_b.w), [self.latents.nope_dims], axis=-1)
        # without the bias of the keys: it adds one number to all logits of a query, which the softmax does not show
        q = jnp.concatenate([jnp.einsum("bthk,hrk->bthr", q_pass, to_k), q_rotated], axis=-1)
        mixed = attend.attend(q, stored, scale=self._scale, window=window)
        values = jnp.einsum("bthr,hrv->bthv", mixed[..., : self.latents.kv_rank], to_v)
        bias_HK = self._bias_HK
        return values if bias_HK is None else values + bias_HK[None, None, :, self.latents.nope_dims :]

    def _makes_keys(self, queries: int, positions: int) -> bool:
        """Whether keys and values of all heads need fewer multiplications than attention to the latents does."""
        a = self.latents
        makes = a.kv_rank * (a.nope_dims + a.v_dims)
        made = positions * makes + queries * positions * (a.head_dim + a.v_dims)
        return made < queries * makes + queries * positions * 2 * (a.kv_rank + a.rotary_dims)

    def _keys_and_values(self, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Entries of the cache (B, 1, S, R + rotary dims) -> (B, H, S, K) and (B, H, S, V)."""
        latent, k_rotated = jnp.split(entry, [self.latents.kv_rank], axis=-1)
        made = constrain(jnp.einsum("bsr,hrk->bhsk", latent[:, 0], dense(self.kv_b.w)), "batch", "heads", None, None)
        bias_HK = self._bias_HK
        if bias_HK is not None:
            made = made + bias_HK[None, :, None]
        k_pass, v = jnp.split(made, [self.latents.nope_dims], axis=-1)
        k_rotated = jnp.broadcast_to(k_rotated, (*k_pass.shape[:-1], k_rotated.shape[-1]))
        return jnp.concatenate([k_pass, k_rotated], axis=-1), v

    @property
    def _bias_HK(self) -> jax.Array | None:
        return None if self.kv_b.b is None else rearrange(self.kv_b.b, "(h k) -> h k", h=self.latents.heads)

    @property
    def _scale(self) -> float:
        a = self.latents
        return float(1 / np.sqrt(a.head_dim) if a.scale is None else a.scale)

    def _heads(self, y: jax.Array) -> jax.Array:
        return constrain(rearrange(y, "b t (h k) -> b t h k", h=self.latents.heads), "batch", "seq", "heads", None)


class LatentAttention(FromLatents):
    """The core of multi-head latent attention (`spec.LatentAttentionSpec`). It gets the products of `inputs`: q (B, T
    or 1, H K) or its latent, and the latent of keys and values with the rotated key (B, T, R + rotary dims). It returns
    the input of `out`, (B, T or 1, H V)."""

    def __init__(self, attention: spec.LatentAttentionSpec, d_model: int, out_stddev: float, name: str):
        a, self.attention, self.name = attention, attention, name
        arrays = spec.with_outputs(a.arrays(d_model), out_stddev)
        with hk.name_scope(name):
            q = Linear.of(arrays, "q" if a.q_rank is None else "q_a")
            if a.q_rank is not None:
                self.q_norm = Norm(a.norm, "q_norm", axis=None)
                self.q_b = Linear.of(arrays, "q_b")
            self.inputs = [q, Linear.of(arrays, "kv_a")]
            self.keys = self.inputs[1:]
            self.kv_norm = Norm(a.norm, "kv_norm", axis=None)
            super().__init__(a, arrays)

    def __call__(self, q: jax.Array, latent: jax.Array, ctx: Context) -> jax.Array:
        with jax.named_scope(self.name):
            return self._mixed(q, latent, ctx)

    def _mixed(self, q: jax.Array, latent: jax.Array, ctx: Context) -> jax.Array:
        a = self.attention
        if a.q_rank is not None:
            (q,) = columns(self.q_norm(q), [self.q_b])
        (q,) = _products(ctx, q)
        q_pass, q_rotated = jnp.split(self._heads(q), [a.nope_dims], axis=-1)
        latent, k_rotated = jnp.split(latent, [a.kv_rank], axis=-1)
        latent, k_rotated = self.kv_norm(latent), k_rotated[:, :, None]
        if isinstance(ctx.positions, Rotation):
            q_rotated = rotate(q_rotated, Rotation(*map(ctx.queries, ctx.positions)), a.positions.style)
            k_rotated = rotate(k_rotated, ctx.positions, a.positions.style)
        return self.attend(ctx, q_pass, q_rotated, latent, k_rotated)


class JointLatentAttention(FromLatents):
    """The core of JAXformer's latent attention (`spec.JointLatentAttentionSpec`). It gets the products of `inputs`,
    which are the latent of q and the latent of keys and values, (B, T, R) each. It returns the input of `out`, (B, T or
    1, H V)."""

    def __init__(self, attention: spec.JointLatentAttentionSpec, d_model: int, out_stddev: float, name: str):
        a, self.attention, self.name = attention, attention, name
        arrays = spec.with_outputs(a.arrays(d_model), out_stddev)
        with hk.name_scope(name):
            self.inputs = [Linear.of(arrays, "q_a"), Linear.of(arrays, "kv_a")]
            # the rotated keys are made of both
            self.keys = self.inputs
            self.q_b = Linear.of(arrays, "q_b")
            if a.positions:
                self.q_r, self.k_r = Linear.of(arrays, "q_r"), Linear.of(arrays, "k_r")
            super().__init__(a, arrays)

    def __call__(self, q_latent: jax.Array, latent: jax.Array, ctx: Context) -> jax.Array:
        with jax.named_scope(self.name):
            q_pass = self._heads(*_products(ctx, *columns(ctx.queries(q_latent), [self.q_b])))
            q_rotated, k_rotated = q_pass[..., :0], latent[:, :, None, :0]
            if self.attention.positions and isinstance(ctx.positions, Rotation):
                both = jnp.concatenate([latent, q_latent], axis=-1)
                q_rotated, k_rotated = self._rotated(both, ctx, ctx.positions, self.attention.positions.style)
            return self.attend(ctx, q_pass, q_rotated, latent, k_rotated)

    def _rotated(self, both: jax.Array, ctx: Context, angles: Rotation, style: str) -> tuple[jax.Array, jax.Array]:
        """The rotated queries and keys, from both latents."""
        heads = self.attention.heads
        q = self._heads(*columns(ctx.queries(both), [self.q_r]))
        (k,) = columns(both, [self.k_r])
        of_heads = Rotation(*(rearrange(ctx.queries(x), "b t (h r) -> b t h r", h=heads) for x in angles))
        return rotate(q, of_heads, style), rotate(k[:, :, None], Rotation(*(x[..., ::heads] for x in angles)), style)


def _products(ctx: Context, *products: jax.Array) -> Sequence[jax.Array]:
    """Products of weights, before they are divided into heads."""
    return ctx.attend.products(*products) if isinstance(ctx.attend, Cached) else products


class HeadMatrices(hk.Module):
    """A matrix of each head: w (H, R, K); and the biases b (H K) of all heads, or None.

    With the heads first, XLA for CPU multiplies each head's latent without a copy of all matrices.
    """

    def __init__(self, arrays: spec.Arrays, name: str):
        super().__init__(name)
        self.w = parameter("w", arrays["w"])
        self.b = parameter("b", arrays["b"]) if "b" in arrays else None

    @property
    def of_all_heads(self) -> Matrix:
        """The matrices side by side: (R, H K)."""
        return self.w.joined() if isinstance(self.w, FormMatrix) else rearrange(self.w, "h r k -> r (h k)")
