"""Attention of a block, as Haiku modules.

Shapes: B sequences, T positions, H heads, J heads of keys and values, K dims of a head of keys, V of values, R of a
latent.
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from mesh_transformer import spec
from mesh_transformer.models.modules import Context, Linear, Norm, columns, parameter
from mesh_transformer.ops.attend.cached import Cached
from mesh_transformer.ops.rotary import Rotation, rotate
from mesh_transformer.ops.tensor_parallel import column
from mesh_transformer.parallel.sharding import constrain


class SelfAttention:
    """Self-attention (`spec.Attention`) between its products. Those of `inputs`, q (B, T or 1, H K), k and v (B, T, J
    K) -> the input of `out`, (B, T or 1, H K). A subclass whose `spec.Attention.maps` are more gets their products
    too."""

    def __init__(self, attention: spec.Attention, d_model: int, out_stddev: float, name: str):
        a, self.attention, self.name = attention, attention, name
        # all modules in one scope: Haiku would number a second scope of the same name
        with hk.name_scope(name):
            self.inputs = [
                Linear(d_model, heads * a.head_dim, ("embed", axis), bias=a.bias, name=name)
                for name, axis, heads in a.maps
            ]
            self.out = Linear(a.heads * a.head_dim, d_model, ("heads", "embed"), stddev=out_stddev, name="o")
            self.keys = self.inputs[1:3]
            self.qk_norms = []
            if a.qk_norm is not None:
                axes = ("heads", a.kv_name) if a.qk_norm_whole else (None, None)
                self.qk_norms = [Norm(a.qk_norm, f"{x}_norm", axis) for x, axis in zip("qk", axes, strict=True)]

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Context) -> jax.Array:
        # the name in profiles
        with jax.named_scope(self.name):
            return self._mixed(q, k, v, ctx)

    def _mixed(self, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Context) -> jax.Array:
        a = self.attention
        if a.qk_norm_whole:
            q, k = self._normed(q, k)
        q, k, v = self._heads(q, "heads"), self._heads(k, a.kv_name), self._heads(v, a.kv_name)
        if not a.qk_norm_whole:
            q, k = self._normed(q, k)
        if a.clip is not None:
            q, k, v = (jnp.clip(x, -a.clip, a.clip) for x in (q, k, v))
        if a.rotary and ctx.rotation:
            angles_q = Rotation(*map(ctx.queries, ctx.rotation))
            q, k = rotate(q, angles_q, a.rotary.style), rotate(k, ctx.rotation, a.rotary.style)
        scale = 1 / np.sqrt(a.head_dim) if a.scale is None else a.scale
        mixed = ctx.attend(q, k, v, scale=scale, window=ctx.window, softcap=a.softcap)
        return rearrange(constrain(mixed, "batch", "seq", "heads", None), "b t h k -> b t (h k)")

    def _normed(self, q: jax.Array, k: jax.Array) -> list[jax.Array]:
        return [norm(x) for norm, x in zip(self.qk_norms, (q, k), strict=True)] if self.qk_norms else [q, k]

    def _heads(self, y: jax.Array, axis: str) -> jax.Array:
        return constrain(rearrange(y, "b t (h k) -> b t h k", k=self.attention.head_dim), "batch", "seq", axis, None)


class LatentAttention:
    """Multi-head latent attention (`spec.LatentAttention`) between its products. Those of `inputs`, q (B, T or 1, H K)
    or its latent, and the latent of keys and values with the rotated key (B, T, R + rotary dims) -> the input of `out`,
    (B, T or 1, H V).

    Whole sequences attend to keys and values of all heads, which are made from the latents. The cache holds the latents
    with the rotated keys. Few queries attend to these as to one head of keys and values that all heads share
    (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). The queries are first multiplied by the matrix that makes keys, and
    the mixed latents at last by the one that makes values. For many queries of a prompt, keys and values of all heads
    are made from the cache (`_makes_keys`).
    """

    def __init__(self, attention: spec.LatentAttention, d_model: int, out_stddev: float, name: str):
        a, self.attention, self.name = attention, attention, name
        queries, latent = a.heads * a.head_dim, a.kv_rank + a.rotary.dims
        with hk.name_scope(name):
            if a.q_rank is None:
                q = Linear(d_model, queries, ("embed", "heads"), name="q")
            else:
                q = Linear(d_model, a.q_rank, ("embed", None), bias=a.bias, name="q_a")
                self.q_norm = Norm(a.norm, "q_norm", axis=None)
                self.q_b = Linear(a.q_rank, queries, (None, "heads"), name="q_b")
            self.inputs = [q, Linear(d_model, latent, ("embed", None), bias=a.bias, name="kv_a")]
            self.keys = self.inputs[1:]
            self.kv_norm = Norm(a.norm, "kv_norm", axis=None)
            self.kv_b = HeadMatrices(a.kv_rank, a.heads, a.nope_dims + a.v_dims, name="kv_b")
            self.out = Linear(a.heads * a.v_dims, d_model, ("heads", "embed"), stddev=out_stddev, name="o")

    def __call__(self, q: jax.Array, latent: jax.Array, ctx: Context) -> jax.Array:
        with jax.named_scope(self.name):
            return self._mixed(q, latent, ctx)

    def _mixed(self, q: jax.Array, latent: jax.Array, ctx: Context) -> jax.Array:
        a = self.attention
        if a.q_rank is not None:
            (q,) = columns(self.q_norm(q), [self.q_b])
        q_pass, q_rotated = jnp.split(self._heads(q), [a.nope_dims], axis=-1)
        latent, k_rotated = jnp.split(latent, [a.kv_rank], axis=-1)
        latent, k_rotated = self.kv_norm(latent), k_rotated[:, :, None]
        if ctx.rotation:
            q_rotated = rotate(q_rotated, Rotation(*map(ctx.queries, ctx.rotation)), a.rotary.style)
            k_rotated = rotate(k_rotated, ctx.rotation, a.rotary.style)
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
        a = self.attention
        (made,) = column(latent, [rearrange(self.kv_b.w, "h r k -> r (h k)")], ["heads"])
        k_pass, v = jnp.split(self._heads(made), [a.nope_dims], axis=-1)
        k_rotated = jnp.broadcast_to(k_rotated, (*k_pass.shape[:-1], a.rotary.dims))
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
        """The same with a cache of latents, to which it adds `entry` (B, T, 1, R + rotary dims)."""
        held = [part for (part,) in attend.hold(entry)]
        if self._makes_keys(q_pass.shape[1], sum(part.shape[2] for part in held)):
            q = jnp.concatenate([q_pass, q_rotated], axis=-1)
            return attend.attend(q, [self._keys_and_values(part) for part in held], scale=self._scale, window=window)
        to_k, to_v = jnp.split(self.kv_b.w, [self.attention.nope_dims], axis=-1)
        q = jnp.concatenate([jnp.einsum("bthk,hrk->bthr", q_pass, to_k), q_rotated], axis=-1)
        mixed = attend.attend(q, [(part,) for part in held], scale=self._scale, window=window)
        return jnp.einsum("bthr,hrv->bthv", mixed[..., : self.attention.kv_rank], to_v)

    def _makes_keys(self, queries: int, positions: int) -> bool:
        """Whether keys and values of all heads need fewer multiplications than attention to the latents does."""
        a = self.attention
        makes = a.kv_rank * (a.nope_dims + a.v_dims)
        made = positions * makes + queries * positions * (a.head_dim + a.v_dims)
        return made < queries * makes + queries * positions * 2 * (a.kv_rank + a.rotary.dims)

    def _keys_and_values(self, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Entries of the cache (B, 1, S, R + rotary dims) -> (B, H, S, K) and (B, H, S, V)."""
        latent, k_rotated = jnp.split(entry, [self.attention.kv_rank], axis=-1)
        made = constrain(jnp.einsum("bsr,hrk->bhsk", latent[:, 0], self.kv_b.w), "batch", "heads", None, None)
        k_pass, v = jnp.split(made, [self.attention.nope_dims], axis=-1)
        k_rotated = jnp.broadcast_to(k_rotated, (*k_pass.shape[:-1], k_rotated.shape[-1]))
        return jnp.concatenate([k_pass, k_rotated], axis=-1), v

    @property
    def _scale(self) -> float:
        a = self.attention
        return float(1 / np.sqrt(a.head_dim) if a.scale is None else a.scale)

    def _heads(self, y: jax.Array) -> jax.Array:
        return constrain(rearrange(y, "b t (h k) -> b t h k", h=self.attention.heads), "batch", "seq", "heads", None)


class HeadMatrices(hk.Module):
    """A matrix of each head: w (H, R, K), truncated normal with 1 / sqrt(R).

    With the heads first, XLA for CPU multiplies each head's latent without a copy of all matrices.
    """

    def __init__(self, rank: int, heads: int, width: int, name: str):
        super().__init__(name)
        init = hk.initializers.TruncatedNormal(1 / np.sqrt(rank))
        self.w = parameter("w", (heads, rank, width), init, "heads", None, None)
