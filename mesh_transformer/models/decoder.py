"""The embedding, block and head of all families: Haiku modules that a `spec.Decoder` describes.

Shapes: B sequences, T positions, S keys, D residual width, H heads, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from mesh_transformer import spec
from mesh_transformer.models.attention import AnyAttention, attention_of
from mesh_transformer.models.feed_forward import Experts, FeedForward
from mesh_transformer.models.modules import ZEROS, Context, Linear, Norm, OutputBias, columns, parameter
from mesh_transformer.ops.attend.causal import soft_capped
from mesh_transformer.ops.linear import add_bias, matmul
from mesh_transformer.ops.tensor_parallel import row
from mesh_transformer.parallel.sharding import constrain

Bias = Callable[[jax.Array, jax.Array], jax.Array]
"""What is added to attention's logits: positions of queries (B, T) and of keys (B, S) -> (B, H, T, S)."""


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


def block(
    decoder: spec.Decoder, layer: spec.Layer, x_BTD: jax.Array, ctx: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One layer of a kind: (B, T, D) -> (B, T or 1, D), and named means over the tokens (none for a dense layer).

    Matrices that multiply the same input are in one call of `column`. `row` sums the products of the tensor-parallel
    shards. The biases are added after it.
    """
    width, out_stddev = decoder.d_model, 2 / len(decoder.layers) / np.sqrt(decoder.d_model)
    attention = attention_of(layer.attention, width, out_stddev, name="attention")
    attention_bias = OutputBias(name="attention_out") if layer.attention.out_bias else _unchanged
    if isinstance(layer.ff, spec.Experts):
        experts = Experts(layer.ff, width, out_stddev, name="ff")
        x_BTD = _attended(layer, attention, attention_bias, x_BTD, ctx)
        ff_BTD, means = experts(_norm(layer, "ff_norm", x_BTD), ctx.dispatch)
        return x_BTD + _post_norm(layer, "ff_post_norm", ff_BTD), means
    ff = FeedForward(layer.ff, width, out_stddev, name="ff")
    ff_bias = OutputBias(name="ff_out") if layer.ff.bias else _unchanged
    if layer.wiring in ("sequential", "sandwich"):
        x_BTD = _attended(layer, attention, attention_bias, x_BTD, ctx)
        ff_BTD = ff_bias(ff.whole(_norm(layer, "ff_norm", x_BTD)))
        return x_BTD + _post_norm(layer, "ff_post_norm", ff_BTD), {}
    also = ff.inputs if layer.wiring == "parallel_one_norm" else []
    products = ctx.columns(_norm(layer, "norm", x_BTD), [*attention.inputs, *also], attention.inputs[1:])
    own = len(attention.inputs)
    mixed, x_BTD = attention(*products[:own], ctx=ctx), ctx.queries(x_BTD)
    hidden = products[own:] or columns(_norm(layer, "ff_norm", x_BTD), ff.inputs)
    # one sum over the shards serves both
    both_BTD = row([mixed, ff(*hidden)], [attention.out.w, ff.out.w])
    return x_BTD + ff_bias(attention_bias(both_BTD)), {}


def _attended(
    layer: spec.Layer,
    attention: AnyAttention,
    bias: Callable[[jax.Array], jax.Array],
    x_BTD: jax.Array,
    ctx: Context,
) -> jax.Array:
    """The residual stream after attention, where this comes before the feed-forward: (B, T, D) -> (B, T or 1, D)."""
    products = ctx.columns(_norm(layer, "norm", x_BTD), attention.inputs, attention.inputs[1:])
    attn_BTD = bias(row([attention(*products, ctx=ctx)], [attention.out.w]))
    return ctx.queries(x_BTD) + _post_norm(layer, "attention_post_norm", attn_BTD)


def _norm(layer: spec.Layer, name: str, x_BTD: jax.Array) -> jax.Array:
    return constrain(Norm(layer.norm, name=name)(x_BTD), "batch", "block_seq", "act_embed")


def _post_norm(layer: spec.Layer, name: str, x_BTD: jax.Array) -> jax.Array:
    """A norm before the addition to the residual stream, in a sandwich."""
    return _norm(layer, name, x_BTD) if layer.wiring == "sandwich" else x_BTD


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
    attention = [f"attention/{name}" for name in ("q", "k", "v", "q_a", "kv_a")]
    ff = ["ff/gate", "ff/in"]
    shared = ["ff/shared/gate", "ff/shared/in"]
    return [attention + ff] if decoder.layer.wiring == "parallel_one_norm" else [attention, ff, shared]


# The modules of a block whose arrays the loops of XLA for CPU read.
EXPERT_MODULES = ("ff/experts",)


def _unchanged(x_BTD: jax.Array) -> jax.Array:
    return x_BTD


class Embedding(hk.Module):
    """Rows of a table (V, D), split by "vocab", plus a bias (D,) if there is one: tokens (B, T) int32 -> (B, T, D).

    The table is truncated normal with `stddev`, by default 1 / sqrt(V).
    """

    def __init__(self, rows: int, width: int, *, bias: bool = False, stddev: float | None = None, name: str):
        super().__init__(name)
        self.shape, self.bias, self.stddev = (rows, width), bias, stddev or 1 / np.sqrt(rows)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = constrain(jnp.take(self.table(), tokens_BT, axis=0), "batch", "seq", "act_embed")
        return add_bias(x_BTD, parameter("b", self.shape[1:], ZEROS, "embed")) if self.bias else x_BTD

    def table(self) -> jax.Array:
        """(V, D)."""
        return parameter("w", self.shape, hk.initializers.TruncatedNormal(self.stddev), "vocab", "embed")


class PositionTable(hk.Module):
    """A learned vector for each position, added to the embedding: positions (B, T) -> (B, T, D)."""

    def __init__(self, n_positions: int, d_model: int, name: str):
        super().__init__(name)
        self.shape = (n_positions, d_model)

    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        table = parameter("w", self.shape, hk.initializers.TruncatedNormal(0.02), None, "embed")
        return jnp.take(table, positions_BT, axis=0)


class RelativeBias(hk.Module):
    """T5's learned bias for each head and bucket of distances (Raffel et al. 2020): a `Bias`."""

    def __init__(self, n_heads: int, n_positions: int, name: str):
        super().__init__(name)
        self.n_heads, self.bucket_of = n_heads, t5_buckets(n_positions)

    def __call__(self) -> Bias:
        init = hk.initializers.TruncatedNormal(0.02)
        table_HN = parameter("w", (self.n_heads, 32), init, "heads", None)

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
