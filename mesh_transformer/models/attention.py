"""Attention of a block, as Haiku modules (`families.spec.Attention`).

Shapes: B sequences, T positions, H heads, J heads of keys and values, K dims of a head.
"""

from __future__ import annotations

import haiku as hk
import jax
import numpy as np
from einops import rearrange

from mesh_transformer.families import spec
from mesh_transformer.models.modules import Context, Linear, Norm
from mesh_transformer.ops.rotary import Rotation, rotate
from mesh_transformer.parallel.sharding import constrain


class SelfAttention:
    """Self-attention between its products. Those of `inputs`, q (B, T or 1, H K), k and v (B, T, J K) -> the input of
    `out`, (B, T or 1, H K)."""

    def __init__(self, attention: spec.Attention, d_model: int, out_stddev: float, name: str):
        a, self.attention, self.name = attention, attention, name
        maps = ("q", a.heads, "heads"), ("k", a.kv_heads, a.kv_name), ("v", a.kv_heads, a.kv_name)
        # all modules in one scope: Haiku would number a second scope of the same name
        with hk.name_scope(name):
            self.inputs = [
                Linear(d_model, heads * a.head_dim, ("embed", axis), bias=a.bias, name=name)
                for name, heads, axis in maps
            ]
            self.out = Linear(a.heads * a.head_dim, d_model, ("heads", "embed"), stddev=out_stddev, name="o")
            self.qk_norms = [Norm(a.qk_norm, f"{name}_norm", axis=None) for name in "qk"] if a.qk_norm else []

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Context) -> jax.Array:
        # the name in profiles
        with jax.named_scope(self.name):
            return self._mixed(q, k, v, ctx)

    def _mixed(self, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Context) -> jax.Array:
        a = self.attention
        q, k, v = self._heads(q, "heads"), self._heads(k, a.kv_name), self._heads(v, a.kv_name)
        if self.qk_norms:
            q, k = (norm(x) for norm, x in zip(self.qk_norms, (q, k), strict=True))
        if a.rotary and ctx.rotation:
            angles_q = Rotation(*map(ctx.queries, ctx.rotation))
            q, k = rotate(q, angles_q, a.rotary.style), rotate(k, ctx.rotation, a.rotary.style)
        scale = 1 / np.sqrt(a.head_dim) if a.scale is None else a.scale
        mixed = ctx.attend(q, k, v, scale=scale, window=ctx.window, softcap=a.softcap)
        return rearrange(constrain(mixed, "batch", "seq", "heads", None), "b t h k -> b t (h k)")

    def _heads(self, y: jax.Array, axis: str) -> jax.Array:
        return constrain(rearrange(y, "b t (h k) -> b t h k", k=self.attention.head_dim), "batch", "seq", axis, None)
