"""A model of any family: parameters, the names of their dimensions, and the loop over layers.

Embedding, block (models/block.py) and head are separate `hk.transform`s. The parameters of a module are stacked by
run (`spec.Decoder.runs`), and one compiled block serves all layers of a kind: compile time does not grow with their
number.

Shapes: B sequences (or cache slots), T positions, S key positions, D residual width, V padded vocabulary rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer import spec
from mesh_transformer.models.block import (
    LayerNumbers,
    block,
    encoded_positions,
    layer_numbers,
    positions_of,
    static_numbers,
)
from mesh_transformer.models.modules import (
    Bias,
    Context,
    Dropout,
    Embedding,
    Linear,
    Norm,
    PositionTable,
    RelativeBias,
    at_position,
)
from mesh_transformer.models.parameters import Parameters, mask_padding
from mesh_transformer.models.stack import LAYER_LOOP, Blocks, Kind, Means, Outputs, Rows, by_row, over_layers
from mesh_transformer.ops.attend import context
from mesh_transformer.ops.attend.cached import Cached, KeyValueView, KVCache, ring_length
from mesh_transformer.ops.attend.causal import Attend, soft_capped
from mesh_transformer.ops.attend.kernel import Windows
from mesh_transformer.ops.experts import Dispatch
from mesh_transformer.ops.linear import PackedBlock, matmul
from mesh_transformer.ops.positions import EncodedPositions
from mesh_transformer.parallel.sharding import Axes, Block, Params, constrain, gather_weights
from mesh_transformer.spec import CacheEntry, Layer

# The named activations of a layer that the backward pass keeps, by the value of `compute.remat`.
KEPT = {
    "full": ["block_in"],
    "save_attn": ["block_in", "attn_out"],
    "save_matmuls": ["block_in", "attn_out", "mlp_hidden"],
}


Views = Sequence[KeyValueView | None]
"""The caches of groups of layers; None: no cache."""
_Carry = tuple[jax.Array, KeyValueView | None]
"""What a layer passes on to the next: the residual stream, and the view that it has written."""
_Computed = tuple[_Carry, Outputs]
_Carries = tuple[jax.Array, Views]


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


class _Stages(NamedTuple):
    """The `hk.transform`s of the Haiku modules."""

    embed: hk.Transformed
    blocks: dict[Layer, hk.Transformed]
    final_norm: hk.Transformed
    unembed: hk.Transformed


@dataclasses.dataclass(frozen=True, eq=False)
class Model(Parameters):
    """`init`, `apply`, and the names of the parameters' dimensions."""

    @functools.cached_property
    def stages(self) -> _Stages:
        """The `hk.transform` of each stage."""
        of = functools.partial
        return _Stages(
            hk.transform(of(embed, self.decoder)),
            {kind: hk.transform(of(block, self.decoder, kind)) for kind in self.decoder.kinds},
            hk.transform(of(final_norm, self.decoder)),
            hk.transform(of(unembed, self.decoder)),
        )

    def new_cache(self, slots: int, length: int, *, longest_chunk: int | None = None, stacked: bool = True) -> KVCache:
        """An empty cache for `slots` sequences of up to `length` positions.

        Args:
            longest_chunk: the largest number of positions in one call of `apply`; None: `length`. The shorter it is,
                the fewer positions the layers with a window keep.
            stacked: whether the parameters of the layers are stacked.
        """
        chunk = length if longest_chunk is None else longest_chunk
        lengths = [ring_length(length, layer.attention.window, chunk) for layer in self.decoder.layers]
        return KVCache.zeros(lengths, slots, self._cache_entries, self.dtype, stacked=stacked)

    @property
    def _cache_entries(self) -> list[tuple[CacheEntry, ...]]:
        return [layer.attention.cache_entries for layer in self.decoder.layers]

    def map_cache(self, function: Callable[[jax.Array, Axes], Any], cache: KVCache) -> KVCache:
        """The cache with function(array, names of its dimensions) in place of each array."""
        return cache.map(function)

    def apply(
        self,
        params: Params,
        tokens_BT: jax.Array,
        cache: KeyValueView | None = None,
        start_B: jax.Array | None = None,
        query_index_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Logits for training (no cache), prefill (T > 1) and decode (T = 1).

        Args:
            params: in the compute dtype.
            tokens_BT: int32; at positions 0 .. T - 1, or start_B + 0 .. T - 1.
            cache: keys and values of earlier positions. Keys and values of the tokens are written to it.
            start_B: int32: position of each sequence's first token; needs a cache.
            query_index_B: int32 indices into T: logits of only this position of each sequence.

        Returns:
            logits (B, T, V), or (B, 1, V) with query_index_B, float32, -inf from n_vocab on; and the cache.
        """
        x_BTD, cache = self.hidden(params, tokens_BT, cache, start_B, query_index_B)
        return self.logits(self.gathered_head(params), x_BTD), cache

    def hidden(
        self,
        params: Params,
        tokens_BT: jax.Array,
        cache: KeyValueView | None = None,
        start_B: jax.Array | None = None,
        query_index_B: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """`apply` without the head: the residual stream after the last block, (B, T, D) or (B, 1, D); the cache.

        `positions_BT` replaces `start_B` where the positions of a row are not consecutive; it needs a cache. Without a
        cache, the tokens are in the order of `Partition.sequence_order`.
        """
        if positions_BT is None:
            length = tokens_BT.shape[1]
            positions_BT = self.positions(length) if cache is None else jnp.arange(length)[None]
            if start_B is not None:
                positions_BT = positions_BT + start_B[:, None]
            elif cache is not None:
                positions_BT = jnp.broadcast_to(positions_BT, tokens_BT.shape)
        keys_BS = None if cache is None or not self.decoder.relative_bias else cache.key_positions(positions_BT)
        x_BTD, bias_BHTS = self.embed(params["embed"], tokens_BT, positions_BT, keys_BS)
        return layers(self, params["blocks"], x_BTD, positions_BT, bias_BHTS, cache, query_index_B)

    def positions(self, length: int) -> jax.Array:
        """The positions of whole sequences, int32 (1, T), in the order of `Partition.sequence_order`."""
        order = context.order(length)
        return (jnp.arange(length) if order is None else jnp.asarray(order))[None]

    def embed(
        self, params: Params, tokens_BT: jax.Array, positions_BT: jax.Array, keys_BS: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """The residual stream before the first block, (B, T, D), and what every layer adds to the logits of its
        attention, (B, H, T, S), if anything.

        Args:
            params: the parameters "embed", in the compute dtype.
            keys_BS: int32: positions of the keys; None: `positions_BT`.
        """
        params = gather_weights(params, self.stage_axes["embed"])
        x_BTD, bias = self.stages.embed.apply(params, None, tokens_BT, positions_BT)
        bias_BHTS = bias and bias(positions_BT, positions_BT if keys_BS is None else keys_BS)
        return x_BTD, bias_BHTS

    def layer(
        self, kind: Layer, params: Block | PackedBlock, x_BTD: jax.Array, ctx: Context
    ) -> tuple[jax.Array, Means]:
        """One layer of a kind, from its own parameters: (B, T, D) -> (B, T or 1, D), and named means."""
        if isinstance(params, PackedBlock):
            params = params.unpack()
        params = gather_weights(params, self.stage_axes["blocks"][kind])
        x_BTD = checkpoint_name(constrain_residual(x_BTD), "block_in")
        return self.stages.blocks[kind].apply(params, None, x_BTD, ctx)

    def context(
        self,
        kind: Layer,
        attend: Attend,
        encoded: Sequence[EncodedPositions],
        numbers: LayerNumbers,
        query_index_B: jax.Array | None = None,
        dispatch: Dispatch | None = None,
        dropout: Dropout | None = None,
        real_BT: jax.Array | None = None,
    ) -> Context:
        """What a layer of a kind reads besides the residual stream.

        Args:
            encoded: the result of `encoded_positions`.
            numbers: the numbers of the layer.
        """
        positions = positions_of(self.decoder, kind.attention.positions, encoded, numbers.encoding)
        return Context(attend, positions, numbers.window, query_index_B, dispatch or Dispatch(), dropout, real_BT)

    def gathered_head(self, params: Params) -> Params:
        """The head's parameters for `logits`: gathered over fsdp, with the embedding's table if it is tied."""
        tied = {"tokens": {"w": params["embed"]["tokens"]["w"]}} if self.decoder.tied else {}
        return gather_weights({**params["head"], **tied}, self.stage_axes["head"])

    def logits(self, head_params: Params, x_BTD: jax.Array) -> jax.Array:
        """The head: (B, T, D) -> (B, T, V) float32, -inf from n_vocab on."""
        return self.unembed(head_params, self.final_norm(head_params, x_BTD))

    def final_norm(self, head_params: Params, x_BTD: jax.Array) -> jax.Array:
        """The first half of the head: (B, T, D) -> (B, T, D)."""
        return self.stages.final_norm.apply(head_params, None, x_BTD)

    def unembed(self, head_params: Params, y_BTD: jax.Array) -> jax.Array:
        """The second half of the head: (B, T, D) -> (B, T, V) float32, -inf from n_vocab on."""
        logits_BTV = constrain(self.stages.unembed.apply(head_params, None, y_BTD), "batch", "seq", "vocab")
        return mask_padding(self.decoder, logits_BTV, 2, -jnp.inf)

    def encoded_positions(self, positions_BT: jax.Array) -> tuple[EncodedPositions, ...]:
        """The arrays of the position encodings: see `numbers.encoded_positions`."""
        return encoded_positions(self.decoder, positions_BT)


def layers(
    model: Model,
    params: Blocks,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    bias_BHTS: jax.Array | None,
    cache: KeyValueView | None,
    query_index_B: jax.Array | None,
) -> tuple[jax.Array, KeyValueView | None]:
    """The residual stream after the last layer, (B, T, D) or (B, 1, D), and the cache: see `Model.hidden`.

    Args:
        params: the parameters "blocks".
        bias_BHTS: what every layer adds to the logits of its attention; None: nothing.
    """
    encoded, count = model.encoded_positions(positions_BT), len(model.decoder.layers)
    views: Views = [None]
    view_of: Sequence[int] = [0] * count
    if cache is not None:
        views, view_of = cache.split(count)

    def layer(kind: Layer, carry: _Carry, block: Block, row: Rows, query_index_B: jax.Array | None = None) -> _Computed:
        (x_BTD, view), (index, numbers) = carry, row
        attend = _bind(view, index, positions_BT, bias_BHTS, query_index_B, model.decoder.windows)
        ctx = model.context(kind, attend, encoded, numbers, query_index_B)
        x_BTD, means = model.layer(kind, block, x_BTD, ctx)
        return (x_BTD, attend.view), (None, means)

    with jax.named_scope(LAYER_LOOP):
        if isinstance(params, tuple):
            last = None if cache is None else query_index_B
            x_BTD, views = _one_by_one(model, layer, x_BTD, views, view_of, params, last)
        else:
            x_BTD, views = _stacked(model, layer, x_BTD, views, view_of, params)
    if query_index_B is not None and x_BTD.shape[1] > 1:
        x_BTD = at_position(x_BTD, query_index_B)
    return constrain_residual(x_BTD), None if cache is None else cache.joined(views)


def _stacked(
    model: Model,
    layer: Callable[..., _Computed],
    x_BTD: jax.Array,
    views: Views,
    view_of: Sequence[int],
    params: Block,
) -> _Carries:
    """The loop over stacked layers. If they have several views, the view and the numbers of a layer are part of the
    program: a ring needs its window as a number."""
    unroll = model.compute.scan_unroll
    if len(views) == 1:

        def one(kind: Kind, carry: _Carry, block: Block, row: Rows) -> _Computed:
            return layer(kind.layer, carry, block, row)

        rows = jnp.arange(len(view_of)), layer_numbers(model.decoder)
        (x_BTD, view), _ = over_layers(model.runs, one, (x_BTD, views[0]), params, rows, unroll=unroll)
        return x_BTD, [view]

    def keyed(kind: Kind, carry: _Carries, block: Block, place: jax.Array) -> tuple[_Carries, Outputs]:
        own, (at, numbers) = kind.layer
        x_BTD, views = carry
        (x_BTD, view), outputs = layer(own, (x_BTD, views[at]), block, (place, numbers))
        return (x_BTD, (*views[:at], view, *views[at + 1 :])), outputs

    keys = list(zip(view_of, static_numbers(model.decoder), strict=True))
    places = jnp.asarray([view_of[:number].count(at) for number, at in enumerate(view_of)])
    start: _Carries = x_BTD, tuple(views)
    return by_row(model.runs, keys, keyed, start, params, places, unroll=unroll)


def _one_by_one(
    model: Model,
    layer: Callable[..., _Computed],
    x_BTD: jax.Array,
    views: Views,
    view_of: Sequence[int],
    params: tuple[Block, ...],
    query_index_B: jax.Array | None,
) -> _Carries:
    """The layers one after the other, each with its own arrays. The last computes only the queries of
    `query_index_B`."""
    views = list(views)
    # layers of one kind are traced once
    jitted = {kind: jax.jit(functools.partial(layer, kind)) for kind in model.decoder.kinds}
    numbers = layer_numbers(model.decoder)

    def one(kind: Kind, x_BTD: jax.Array, block: Block, number: int) -> tuple[jax.Array, Outputs]:
        at, row = view_of[number], (0, jax.tree.map(lambda x: x[number], numbers))
        query = query_index_B if number == len(params) - 1 else None
        (x_BTD, views[at]), outputs = jitted[kind.layer]((x_BTD, views[at]), block, row, query)
        return x_BTD, outputs

    return over_layers(model.runs, one, x_BTD, params, range(len(params)))[0], views


def _bind(
    view: KeyValueView | None,
    layer: jax.Array,
    positions_BT: jax.Array,
    bias_BHTS: jax.Array | None,
    query_index_B: jax.Array | None,
    windows: Windows,
) -> context.Whole | Cached:
    """The attention of one layer: to the sequence itself, or to the keys and values of a view."""
    if view is None:
        return context.attention(bias_BHTS, windows=windows)
    if query_index_B is None:
        return Cached(view, layer, positions_BT, positions_BT, bias_BHTS)
    if bias_BHTS is not None:
        bias_BHTS = at_position(bias_BHTS.swapaxes(1, 2), query_index_B).swapaxes(1, 2)
    return Cached(view, layer, positions_BT, at_position(positions_BT, query_index_B), bias_BHTS)


def constrain_residual(x_BTD: jax.Array) -> jax.Array:
    """The sharding of the residual stream between blocks."""
    return constrain(x_BTD, "batch", "block_seq", "act_embed")
