"""The embedding, block and head of all families: Haiku modules that a `spec.Decoder` describes.

Shapes: B sequences, T positions, S keys, D residual width, H heads, V vocabulary rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from mesh_transformer import spec
from mesh_transformer.models.mechanisms import BlockModule, module_of
from mesh_transformer.models.modules import Context, Linear, Means, Norm, OutputBias, columns, parameter
from mesh_transformer.ops.attend.causal import soft_capped
from mesh_transformer.ops.linear import add_bias, lookup, matmul
from mesh_transformer.ops.tensor_parallel import row
from mesh_transformer.parallel.sharding import constrain

Bias = Callable[[jax.Array, jax.Array], jax.Array]
"""What is added to attention's logits: positions of queries (B, T) and of keys (B, S) -> (B, H, T, S)."""


def embed(decoder: spec.Decoder, tokens_BT: jax.Array, positions_BT: jax.Array) -> tuple[jax.Array, Bias | None]:
    """The residual stream before the first block, (B, T, D), and the bias of every layer's attention, if there is
    one."""
    d = decoder
    x_BTD = token_table(d)(tokens_BT)
    if d.embed_scale != 1:
        x_BTD = x_BTD * jnp.asarray(d.embed_scale, x_BTD.dtype)
    if d.embed_norm is not None:
        x_BTD = Norm(d.embed_norm, name="norm")(x_BTD)
    if d.learned_positions:
        table = PositionTable(d.embedding_arrays["positions/w"], name="positions")
        x_BTD = x_BTD + table(d.unused_positions + positions_BT)
    if not d.relative_bias:
        return x_BTD, None
    return x_BTD, RelativeBias(d.embedding_arrays["relative/w"], d.seq, name="relative")()


def block(
    decoder: spec.Decoder, layer: spec.Layer, x_BTD: jax.Array, ctx: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One layer of a kind: (B, T, D) -> (B, T or 1, D), and named means over the tokens (none for a dense layer).

    Matrices that multiply one input are in one call of `column`. `row` sums the products of the tensor-parallel
    shards of all parts of a branch at once. The biases are added after it.
    """
    modules = {one.name: module_of(one, decoder.d_model, decoder.output_stddev) for one in layer.mechanisms}
    means: dict[str, jax.Array] = {}
    everywhere = ctx._replace(query_index_B=None)
    for number, branch in enumerate(layer.branches):
        attends = layer.attention in branch.mechanisms
        y_BTD = _branch(branch, modules, x_BTD, ctx if attends else everywhere, means)
        if ctx.dropout is not None:
            y_BTD = ctx.dropout(y_BTD, number)
        x_BTD = (ctx.queries(x_BTD) if attends else x_BTD) + y_BTD
    return x_BTD, means


def _branch(
    branch: spec.Branch, modules: Mapping[str, BlockModule], x_BTD: jax.Array, ctx: Context, means: Means
) -> jax.Array:
    """What a branch adds to x: (B, T, D) -> (B, T or 1, D). Named means are added to `means`."""
    mixed, matrices, added = [], [], []
    for reading in branch.readings:
        parts = [modules[part.mechanism.name] for part in reading.parts]
        keys = [linear for part in parts for linear in part.keys]
        z_BTD = x_BTD if keys else ctx.queries(x_BTD)
        if reading.norm is not None:
            z_BTD = _norm(reading.norm, reading.name, z_BTD)
        inputs = [linear for part in parts for linear in part.inputs]
        products = iter(ctx.columns(z_BTD, inputs, keys) if keys else columns(z_BTD, inputs) if inputs else [])
        for part in parts:
            read = [next(products) for _ in part.inputs] or [ctx.queries(z_BTD) if keys else z_BTD]
            found = part(*read, ctx=ctx)
            y, own = found if isinstance(found, tuple) else (found, {})
            means |= own
            if part.out is None:
                added.append(y)
            else:
                mixed.append(y)
                matrices.append(part.out.w)
    outputs = [row(mixed, matrices)] if mixed else []
    y_BTD = functools.reduce(jnp.add, [*outputs, *added])
    for mechanism in branch.mechanisms:
        if mechanism.out_bias:
            y_BTD = OutputBias(name=f"{mechanism.name}_out")(y_BTD)
    if branch.post is not None:
        y_BTD = _norm(branch.post, branch.post_name, y_BTD)
    if branch.scale != 1:
        y_BTD = y_BTD * jnp.asarray(branch.scale, y_BTD.dtype)
    return y_BTD


def _norm(norm: spec.Norm, name: str, x_BTD: jax.Array) -> jax.Array:
    return constrain(Norm(norm, name=name)(x_BTD), "batch", "block_seq", "act_embed")


def final_norm(decoder: spec.Decoder, x_BTD: jax.Array) -> jax.Array:
    """(B, T, D) -> (B, T, D)."""
    return Norm(decoder.final_norm, name="norm")(x_BTD)


def unembed(decoder: spec.Decoder, y_BTD: jax.Array) -> jax.Array:
    """The logits of the final norm's output: (B, T, D) -> (B, T, V) float32."""
    d = decoder
    if d.tied:
        logits_BTV = matmul(y_BTD, token_table(d).table().T, jnp.float32)
    else:
        logits_BTV = Linear.of(d.head_arrays, "logits")(y_BTD, jnp.float32)
    if d.logit_scale != 1:
        logits_BTV = logits_BTV * d.logit_scale
    return logits_BTV if d.softcap is None else soft_capped(logits_BTV, d.softcap)


def token_table(decoder: spec.Decoder) -> Embedding:
    """The embedding of the tokens, which a tied head reads too."""
    return Embedding.of(decoder.embedding_arrays, "tokens")


def fusable_modules(decoder: spec.Decoder) -> Sequence[Sequence[str]]:
    """Groups of modules of a block whose matrices multiply one input, so that they can be fused."""
    groups: dict[tuple[str, ...], None] = {}
    for kind in decoder.kinds:
        for branch in kind.branches:
            for reading in branch.readings:
                groups |= dict.fromkeys(_fused(decoder, [part.mechanism for part in reading.parts]))
    return list(groups)


def _fused(decoder: spec.Decoder, mechanisms: Sequence[spec.Mechanism]) -> Iterator[tuple[str, ...]]:
    """The modules of the matrices that multiply the input of these mechanisms; `shared` experts are computed apart."""
    together: list[str] = []
    apart: list[str] = []
    for one in mechanisms:
        for path, array in one.arrays(decoder.d_model).items():
            if array.role == "input" and len(array.shape) == 2 and path.endswith("/w"):
                name = f"{one.name}/{path.removesuffix('/w')}"
                (together if path.count("/") == 1 else apart).append(name)
    yield from (tuple(names) for names in (together, apart) if names)


class Embedding(hk.Module):
    """Rows of a table (V, D), split by "vocab", plus a bias (D,) if there is one: tokens (B, T) int32 -> (B, T, D).

    The table is truncated normal with `stddev`, by default 1 / sqrt(V).
    """

    def __init__(self, rows: int, width: int, *, bias: bool = False, stddev: float | None = None, name: str):
        super().__init__(name)
        self.w = spec.Array(("vocab", "embed"), (rows, width), stddev=stddev or 1 / math.sqrt(rows))
        self.b = spec.Array(("embed",), (width,)) if bias else None

    @classmethod
    def of(cls, arrays: spec.Arrays, name: str) -> Self:
        """The embedding `name` of a model that has these arrays."""
        own = spec.inside(name, arrays)
        return cls(*own["w"].shape, bias="b" in own, stddev=own["w"].stddev, name=name)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = constrain(lookup(self.table(), tokens_BT, 0, ("batch", "seq")), "batch", "seq", "act_embed")
        return x_BTD if self.b is None else add_bias(x_BTD, parameter("b", self.b))

    def table(self) -> jax.Array:
        """(V, D)."""
        return parameter("w", self.w)


class PositionTable(hk.Module):
    """A learned vector for each position, added to the embedding: positions (B, T) -> (B, T, D)."""

    def __init__(self, array: spec.Array, name: str):
        super().__init__(name)
        self.array = array

    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        return lookup(parameter("w", self.array), positions_BT)


class RelativeBias(hk.Module):
    """T5's learned bias for each head and bucket of distances (Raffel et al. 2020): a `Bias`."""

    def __init__(self, array: spec.Array, n_positions: int, name: str):
        super().__init__(name)
        self.array, self.bucket_of = array, t5_buckets(n_positions)

    def __call__(self) -> Bias:
        table_HN = parameter("w", self.array)

        def bias(positions_BT: jax.Array, keys_BS: jax.Array) -> jax.Array:
            distance = positions_BT[:, :, None] - keys_BS[:, None]
            distance = jnp.clip(distance, 0, len(self.bucket_of) - 1)
            bias_HBTS = lookup(table_HN, jnp.asarray(self.bucket_of)[distance], 1)
            return rearrange(bias_HBTS, "h b t s -> b h t s")

        return bias


def t5_buckets(n_positions: int, buckets: int = spec.T5_BUCKETS, max_distance: int = 128) -> np.ndarray:
    """Bucket of each distance 0 .. n_positions - 1 to an earlier key (Raffel et al. 2020, one direction).

    The first half of the buckets hold one distance each, the rest grow logarithmically up to `max_distance`.
    Returns (n_positions,) int32.
    """
    exact = buckets // 2
    distance = np.arange(n_positions)
    grown = np.log(np.maximum(distance, 1).astype(np.float32) / exact + np.finfo(np.float32).eps)
    far = exact + (grown / np.log(max_distance / exact) * (buckets - exact)).astype(np.int32)
    return np.where(distance < exact, distance, np.minimum(far, buckets - 1)).astype(np.int32)
