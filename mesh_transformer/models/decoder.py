"""The embedding, block and head of all families: Haiku modules that a `families.spec.Decoder` describes.

Modules name the dimensions of their parameters; the mesh decides elsewhere how these are split. Checkpoints contain the
names of the parameters, so these names do not change.

Shapes: B sequences, T positions, S keys, D residual width, H heads, J heads of keys and values, K dims of a head, F
feed-forward width, V vocabulary rows. Parameters are float32 and are cast to the compute dtype before `apply`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.families import spec
from mesh_transformer.ops.attend.causal import Attend, soft_capped
from mesh_transformer.ops.linear import add_bias, matmul
from mesh_transformer.ops.rotary import Rotation, rotate
from mesh_transformer.ops.tensor_parallel import column, row
from mesh_transformer.parallel.sharding import constrain, with_axes

_zeros = hk.initializers.Constant(0.0)
# Without jax.checkpoint the backward pass keeps five tensors of the activation's size.
_ACTIVATIONS: dict[spec.Activation, Callable[[jax.Array], jax.Array]] = {
    "gelu": jax.checkpoint(functools.partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": jax.checkpoint(functools.partial(jax.nn.gelu, approximate=True)),
    "silu": jax.checkpoint(jax.nn.silu),
    "relu": jax.nn.relu,
}

Bias = Callable[[jax.Array, jax.Array], jax.Array]
"""What is added to attention's logits: positions of queries (B, T) and of keys (B, S) -> (B, H, T, S)."""


class Context(NamedTuple):
    """The inputs of a block besides the residual stream."""

    attend: Attend
    # None: the attention has no rotary encoding
    rotation: Rotation | None
    # int32: the number of keys that a query sees, the last of them at its own position; None: all up to its own
    window: jax.Array | int | None = None
    # int32 indices into T: the block returns only this position of each sequence, (B, 1, D); None: all
    query_index_B: jax.Array | None = None

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        """The positions of (B, T, ...) that the block returns: all, or one, (B, 1, ...)."""
        return x_BTD if self.query_index_B is None else at_position(x_BTD, self.query_index_B)

    def columns(
        self, x_BTD: jax.Array, linears: Sequence[Linear], everywhere: Sequence[Linear] = ()
    ) -> list[jax.Array]:
        """Linear maps of the positions that the block returns, those in `everywhere` of all positions."""
        if self.query_index_B is None:
            return columns(x_BTD, linears)
        queries = self.queries(x_BTD)
        return [columns(x_BTD if linear in everywhere else queries, [linear])[0] for linear in linears]


def embed(decoder: spec.Decoder, tokens_BT: jax.Array, positions_BT: jax.Array) -> tuple[jax.Array, Bias | None]:
    """The residual stream before the first block, (B, T, D), and the bias of every layer's attention, if the model has
    one."""
    d = decoder
    x_BTD = token_table(d)(tokens_BT)
    if d.embed_scale != 1:
        x_BTD = x_BTD * jnp.asarray(d.embed_scale, x_BTD.dtype)
    if d.learned_positions:
        x_BTD = x_BTD + PositionTable(d.seq, d.d_model, name="positions")(positions_BT)
    heads = d.layer.attention.heads
    return x_BTD, RelativeBias(heads, d.seq, name="relative")() if d.relative_bias else None


def block(decoder: spec.Decoder, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One layer: (B, T, D) -> (B, T or 1, D), and named sums over the tokens (none for a dense layer).

    Matrices that multiply the same input are in one call of `column`. `row` sums the products of the tensor-parallel
    shards: where attention and feed-forward run in parallel, one sum serves both. The biases are added after it.
    """
    layer, out_stddev = decoder.layer, 2 / len(decoder.layers) / np.sqrt(decoder.d_model)
    attention = SelfAttention(layer.attention, decoder.d_model, out_stddev, name="attention")
    ff = FeedForward(layer.ff, decoder.d_model, out_stddev, name="ff")
    attention_bias = OutputBias(name="attention_out") if layer.attention.out_bias else _unchanged
    ff_bias = OutputBias(name="ff_out") if layer.ff.bias else _unchanged

    def norm(name: str, x_BTD: jax.Array) -> jax.Array:
        return constrain(Norm(layer.norm, name=name)(x_BTD), "batch", "block_seq", "act_embed")

    also = ff.inputs if layer.wiring == "parallel_one_norm" else []
    q, k, v, *hidden = ctx.columns(norm("norm", x_BTD), [*attention.inputs, *also], attention.inputs[1:])
    mixed, x_BTD = attention(q, k, v, ctx), ctx.queries(x_BTD)
    if layer.wiring in ("parallel", "parallel_one_norm"):
        hidden = hidden or columns(norm("ff_norm", x_BTD), ff.inputs)
        both = row([mixed, ff(*hidden)], [attention.out.w, ff.out.w])
        return x_BTD + ff_bias(attention_bias(both)), {}
    attn_BTD, sandwich = attention_bias(row([mixed], [attention.out.w])), layer.wiring == "sandwich"
    x_BTD = x_BTD + (norm("attention_post_norm", attn_BTD) if sandwich else attn_BTD)
    ff_BTD = ff_bias(row([ff(*columns(norm("ff_norm", x_BTD), ff.inputs))], [ff.out.w]))
    return x_BTD + (norm("ff_post_norm", ff_BTD) if sandwich else ff_BTD), {}


def final_norm(decoder: spec.Decoder, x_BTD: jax.Array) -> jax.Array:
    """(B, T, D) -> (B, T, D)."""
    return Norm(decoder.final_norm, name="norm")(x_BTD)


def unembed(decoder: spec.Decoder, y_BTD: jax.Array) -> jax.Array:
    """The logits of the final norm's output: (B, T, D) -> (B, T, V) float32."""
    d = decoder
    if d.tied:
        logits_BTV = matmul(y_BTD, token_table(d).table().T, jnp.float32)
    else:
        head = Linear(d.d_model, d.padded_vocab, ("embed", "vocab"), bias=d.head_bias, name="logits")
        logits_BTV = head(y_BTD, jnp.float32)
    return logits_BTV if d.softcap is None else soft_capped(logits_BTV, d.softcap)


def token_table(decoder: spec.Decoder) -> Embedding:
    """The embedding of the tokens, which a tied head reads too."""
    d = decoder
    return Embedding(d.padded_vocab, d.d_model, bias=d.embed_bias, stddev=1 / np.sqrt(d.n_vocab), name="tokens")


def fusable_modules(decoder: spec.Decoder) -> Sequence[Sequence[str]]:
    """Groups of modules of a block whose matrices multiply the same activations, so that they can be fused."""
    attention, ff = ["attention/q", "attention/k", "attention/v"], ["ff/gate", "ff/in"]
    return [attention + ff] if decoder.layer.wiring == "parallel_one_norm" else [attention, ff]


def _unchanged(x_BTD: jax.Array) -> jax.Array:
    return x_BTD


def at_position(x_BTD: jax.Array, index_B: jax.Array) -> jax.Array:
    """One position of each sequence: (B, T, ...) and int32 indices into T -> (B, 1, ...)."""
    return jax.vmap(lambda x_TD, index: jax.lax.dynamic_slice_in_dim(x_TD, index, 1))(x_BTD, index_B)


def _parameter(name: str, shape: tuple[int, ...], init: hk.initializers.Initializer, *axes: str | None) -> jax.Array:
    return hk.get_parameter(name, shape, jnp.float32, init=with_axes(init, *axes))


class Linear(hk.Module):
    """x @ w (+ b): (..., D_in) -> (..., D_out). w is truncated normal with `stddev`, by default 1 / sqrt(D_in).

    The products of a block are made elsewhere, from `w` (`columns`, `row`).
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        axes: tuple[str, str],
        *,
        bias: bool = False,
        stddev: float | None = None,
        name: str,
    ):
        super().__init__(name)
        init = hk.initializers.TruncatedNormal(stddev or 1 / np.sqrt(d_in))
        self.axes = axes
        self.w = _parameter("w", (d_in, d_out), init, *axes)
        self.b = _parameter("b", (d_out,), _zeros, axes[1]) if bias else None

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        return self.biased(matmul(x, self.w, out_dtype or x.dtype))

    def biased(self, y: jax.Array) -> jax.Array:
        """y + b, of a product y with w; y itself without a bias."""
        return y if self.b is None else add_bias(y, self.b)


def columns(x_BTD: jax.Array, linears: Sequence[Linear]) -> list[jax.Array]:
    """Linear maps of one input, whose outputs devices split."""
    products = column(x_BTD, [linear.w for linear in linears], [linear.axes[1] for linear in linears])
    return [linear.biased(y) for linear, y in zip(linears, products, strict=True)]


class OutputBias(hk.Module):
    """x + b, for a bias that is added after a sum over tensor-parallel shards: (B, T, D) -> (B, T, D)."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return add_bias(x_BTD, _parameter("b", x_BTD.shape[-1:], _zeros, "embed"))


class Embedding(hk.Module):
    """Rows of a table (V, D), split by "vocab", plus a bias (D,) if there is one: tokens (B, T) int32 -> (B, T, D).

    The table is truncated normal with `stddev`, by default 1 / sqrt(V).
    """

    def __init__(self, rows: int, width: int, *, bias: bool = False, stddev: float | None = None, name: str):
        super().__init__(name)
        self.shape, self.bias, self.stddev = (rows, width), bias, stddev or 1 / np.sqrt(rows)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = constrain(jnp.take(self.table(), tokens_BT, axis=0), "batch", "seq", "act_embed")
        return add_bias(x_BTD, _parameter("b", self.shape[1:], _zeros, "embed")) if self.bias else x_BTD

    def table(self) -> jax.Array:
        """(V, D)."""
        return _parameter("w", self.shape, hk.initializers.TruncatedNormal(self.stddev), "vocab", "embed")


class PositionTable(hk.Module):
    """A learned vector for each position, added to the embedding: positions (B, T) -> (B, T, D)."""

    def __init__(self, n_positions: int, d_model: int, name: str):
        super().__init__(name)
        self.shape = (n_positions, d_model)

    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        table = _parameter("w", self.shape, hk.initializers.TruncatedNormal(0.02), None, "embed")
        return jnp.take(table, positions_BT, axis=0)


class RelativeBias(hk.Module):
    """T5's learned bias for each head and bucket of distances (Raffel et al. 2020): a `Bias`."""

    def __init__(self, n_heads: int, n_positions: int, name: str):
        super().__init__(name)
        self.n_heads, self.bucket_of = n_heads, t5_buckets(n_positions)

    def __call__(self) -> Bias:
        init = hk.initializers.TruncatedNormal(0.02)
        table_HN = _parameter("w", (self.n_heads, 32), init, "heads", None)

        def bias(positions_BT: jax.Array, keys_BS: jax.Array) -> jax.Array:
            distance = positions_BT[:, :, None] - keys_BS[:, None]
            distance = jnp.clip(distance, 0, len(self.bucket_of) - 1)
            bias_HBTS = jnp.take(table_HN, jnp.asarray(self.bucket_of)[distance], axis=1)
            return rearrange(bias_HBTS, "h b t s -> b h t s")

        return bias


def t5_buckets(n_positions: int, buckets: int = 32, max_distance: int = 128) -> np.ndarray:
    """Bucket of each distance 0 .. n_positions - 1 to an earlier key (Raffel et al. 2020, one direction).

    The first half of the buckets hold one distance each, the rest grow logarithmically up to `max_distance`.
    Returns (n_positions,) int32.
    """
    exact = buckets // 2
    distance = np.arange(n_positions)
    grown = np.log(np.maximum(distance, 1).astype(np.float32) / exact + np.finfo(np.float32).eps)
    far = exact + (grown / np.log(max_distance / exact) * (buckets - exact)).astype(np.int32)
    return np.where(distance < exact, distance, np.minimum(far, buckets - 1)).astype(np.int32)


class Norm(hk.Module):
    """A normalization (`spec.Norm`): (..., D) -> (..., D) of x's dtype, computed in float32; `axis` names D."""

    def __init__(self, norm: spec.Norm, name: str, axis: str | None = "embed"):
        super().__init__(name)
        self.norm, self.axis = norm, axis

    def __call__(self, x: jax.Array) -> jax.Array:
        width, x32, eps = x.shape[-1], x.astype(jnp.float32), self.norm.eps
        if self.norm.kind == "length":
            y = x32 / (jnp.sqrt(jnp.square(x32).sum(-1, keepdims=True)) + eps)
            start = np.sqrt(width)
        else:
            if self.norm.kind == "layer":
                x32 = x32 - x32.mean(-1, keepdims=True)
            y, start = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps), 1.0
        shape: tuple[int, ...] = () if self.norm.one_scale else (width,)
        axes = (self.axis,) * len(shape)

        def parameter(name: str, init: hk.initializers.Initializer) -> jax.Array:
            value = _parameter(name, shape, init, *axes).astype(y.dtype)
            # not jnp.broadcast_to: what the backward pass keeps would have y's shape
            return jax.lax.broadcast_to_rank(value, y.ndim)

        if self.norm.plus_one:
            y = y * (1 + parameter("scale", _zeros))
        else:
            y = y * parameter("scale", hk.initializers.Constant(start))
        if self.norm.offset:
            y = y + parameter("offset", _zeros)
        return y.astype(x.dtype)


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


class FeedForward:
    """The feed-forward layer (`spec.Dense`) between its products: those of `inputs` -> the input of `out`, all
    (B, T, F)."""

    def __init__(self, ff: spec.Dense, d_model: int, out_stddev: float, name: str):
        self.ff, self.name = ff, name
        with hk.name_scope(name):
            names = ("in", "gate") if ff.gated else ("in",)
            self.inputs = [Linear(d_model, ff.d_ff, ("embed", "mlp"), bias=ff.bias, name=name) for name in names]
            self.out = Linear(ff.d_ff, d_model, ("mlp", "embed"), stddev=out_stddev, name="out")

    def __call__(self, *products: jax.Array) -> jax.Array:
        activation = _ACTIVATIONS[self.ff.activation]
        with jax.named_scope(self.name):
            hidden, *gate = (checkpoint_name(constrain(y, "batch", "seq", "mlp"), "mlp_hidden") for y in products)
            return activation(*gate) * hidden if gate else activation(hidden)
