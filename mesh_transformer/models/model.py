"""The forward pass of any family: embedding, layers and logits, with a cache or without one.

Read three files with this one: models/block.py (a layer), models/stack.py (the loop over layers) and
parallel/sharding.py (what a device has of an array). docs/training_step.md has a longer list. What is unusual:

- The model is data, a `spec.Decoder`. A Haiku module asks it for the arrays that it has.
- Embedding, block and head are separate `hk.transform`s, which are applied to parts of one tree (models/parameters.py).
- The parameters of a module are stacked by group of layers (`spec.Decoder.layer_groups`), and one traced block serves
  all layers of a kind: compile time does not grow with their number.
- Code names dimensions, and the active `Partition` splits them: the same code runs on one device and on a pod.
- Attention is an argument of a layer (`Context.attend`): of whole sequences (ops/attend/context.py), or through a cache
  (ops/attend/cached.py). Training, scoring, prefill and decode share embedding, layer and head. Training adds
  documents, dropout and the dispatch to experts, which `embed` and `layer` take.
- For a server and for device_sample.py on a CPU the parameters are packed, and `PackedModel` replaces `Model.loop`
  (infer/cpu/model.py).

Shapes: B sequences (or cache slots), T positions, S key positions, H heads, D residual width, V padded vocabulary rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer import spec
from mesh_transformer.models.block import (
    LayerNumbers,
    block,
    block_of_forms,
    cached_attention,
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
from mesh_transformer.models.stack import LAYER_LOOP, Kind, Means, Outputs, Rows, Stream, by_row, over_layers
from mesh_transformer.ops.attend import context
from mesh_transformer.ops.attend.cached import Cached, KeyValueView, KVCache, ring_length
from mesh_transformer.ops.attend.causal import soft_capped
from mesh_transformer.ops.experts import Dispatch
from mesh_transformer.ops.linear import matmul
from mesh_transformer.ops.positions import EncodedPositions
from mesh_transformer.parallel.sharding import Block, Params, constrain, gather_weights
from mesh_transformer.spec import CacheEntry, Layer

Views = Sequence[KeyValueView | None]
"""The views of the cache: one for all layers whose caches have one length and equal entries; None without cache."""
Carry = tuple[jax.Array, KeyValueView | None]
"""The carry of a layer: the residual stream, and the view with the layer's keys and values."""
Carries = tuple[jax.Array, Views]
"""The carry with the views of all layers."""


def embed(decoder: spec.Decoder, tokens_BT: jax.Array, positions_BT: jax.Array) -> tuple[jax.Array, Bias | None]:
    """The residual stream before the first block, (B, T, D), and the bias of every layer's attention, if there is
    one: a function of the positions of queries and keys."""
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


class Inputs(NamedTuple):
    """The inputs of all layers that depend on the batch only."""

    # the result of `block.encoded_positions`
    encoded: tuple[EncodedPositions, ...]
    # int32; without a cache, B may be 1: all sequences have the same positions
    positions_BT: jax.Array
    # int32: the document of each token, or 0 outside of documents; None if all tokens are one document
    segments_BT: jax.Array | None = None
    # uint32: two random words for each token (`Dropout.noise_BT2`); None without dropout
    noise_BT2: jax.Array | None = None


class _Stages(NamedTuple):
    """The `hk.transform`s of the Haiku modules. The head is two."""

    embed: hk.Transformed
    blocks: dict[Layer, hk.Transformed]
    final_norm: hk.Transformed
    unembed: hk.Transformed


@dataclasses.dataclass(frozen=True, eq=False)
class Model(Parameters):
    """`init`, `apply`, and the names of the parameters' dimensions."""

    shares_caches: ClassVar[bool] = True
    """Whether layers whose caches have one length and equal entries share their arrays."""

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

    def new_cache(self, slots: int, length: int, *, longest_chunk: int | None = None) -> KVCache:
        """An empty cache for `slots` sequences of up to `length` positions.

        Args:
            longest_chunk: the largest number of positions in one call of `apply`, by default `length`. The shorter it
                is, the fewer positions the layers with a window keep.
        """
        chunk = length if longest_chunk is None else longest_chunk
        lengths = [ring_length(length, layer.attention.window, chunk) for layer in self.decoder.layers]
        return KVCache.zeros(lengths, slots, self._cache_entries, self.dtype, stacked=self.shares_caches)

    @property
    def _cache_entries(self) -> list[tuple[CacheEntry, ...]]:
        return [layer.attention.cache_entries for layer in self.decoder.layers]

    def apply(
        self,
        params: Params,
        tokens_BT: jax.Array,
        cache: KeyValueView | None = None,
        start_B: jax.Array | None = None,
        query_index_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Logits of whole sequences (no cache), of prefill (T > 1) and of decode (T = 1). A training step calls `embed`
        and `layer` itself (`TrainProgram._parts`).

        Args:
            params: the result of `cast`.
            tokens_BT: int32; at positions start_B + 0 .. T - 1. Without a cache, at 0 .. T - 1 in the order of
                `Partition.sequence_order`, which the logits have too.
            cache: keys and values of earlier positions. Keys and values of the tokens are written to it.
            start_B: int32: position of each sequence's first token, with a cache only.
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

        `positions_BT` replaces `start_B` where the positions of a row are not consecutive, with a cache only.
        """
        if positions_BT is None:
            length = tokens_BT.shape[1]
            positions_BT = self.positions(length) if cache is None else jnp.arange(length)[None]
            if start_B is not None:
                positions_BT = positions_BT + start_B[:, None]
            elif cache is not None:
                positions_BT = jnp.broadcast_to(positions_BT, tokens_BT.shape)
        keys_BS = None if cache is None or not self.decoder.relative_bias else cache.key_positions(positions_BT)
        stream = self.embed(params["embed"], tokens_BT, positions_BT, keys_BS=keys_BS)
        return self.layers(params["blocks"], stream, cache, query_index_B)

    def positions(self, length: int) -> jax.Array:
        """The positions of whole sequences, int32 (1, T), in the order of `Partition.sequence_order`."""
        order = context.order(length)
        return (jnp.arange(length) if order is None else jnp.asarray(order))[None]

    def embed(
        self,
        params: Params,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        *,
        keys_BS: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        noise_BT2: jax.Array | None = None,
        dropout_rate: float = 0.0,
    ) -> Stream:
        """The input of the first layer. `Stream.fixed` is an `Inputs`.

        Args:
            params: the parameters "embed", in the compute dtype.
            keys_BS: int32: positions of the keys, by default `positions_BT`.
            segments_BT, noise_BT2: as in `Inputs`.
            dropout_rate: the share of numbers that are set to 0, if there is `noise_BT2`.
        """
        params = gather_weights(params, self.stage_axes["embed"])
        x_BTD, bias = self.stages.embed.apply(params, None, tokens_BT, positions_BT)
        bias_BHTS = bias and bias(positions_BT, positions_BT if keys_BS is None else keys_BS)
        if noise_BT2 is not None and dropout_rate:
            x_BTD = Dropout(dropout_rate, noise_BT2, -1)(x_BTD)
        encoded = encoded_positions(self.decoder, positions_BT)
        return Stream(x_BTD, bias_BHTS, Inputs(encoded, positions_BT, segments_BT, noise_BT2))

    def layer(
        self,
        kind: Layer,
        params: Block,
        stream: Stream,
        numbers: LayerNumbers,
        *,
        view: KeyValueView | None = None,
        index: jax.Array | int = 0,
        query_index_B: jax.Array | None = None,
        dropout_rate: float = 0.0,
        dispatch: Dispatch | None = None,
    ) -> tuple[Carry, Means]:
        """One layer of a kind, with or without a cache: (B, T, D) -> (B, T or 1, D), the view that it has written, and
        named means over its tokens.

        Args:
            params: of this layer, in the compute dtype.
            stream: the result of `embed`, with the residual stream before this layer.
            numbers: of this layer.
            view: keys and values of earlier positions. Without it, the sequences attend to themselves.
            index: the number of the layer in the view.
            query_index_B: int32 indices into T: the layer returns only this position of each sequence.
            dropout_rate: as in `embed`.
            dispatch: how tokens reach routed experts, by default `Dispatch()`.
        """
        encoded, positions_BT, segments_BT, noise_BT2 = stream.fixed
        attend: context.Whole | Cached
        if view is None:
            attend = context.attention(stream.learned, segments_BT, self.decoder.windows)
        else:
            attend = cached_attention(view, index, positions_BT, stream.learned, query_index_B)
        dropout = None
        if noise_BT2 is not None and numbers.layer is not None and dropout_rate:
            dropout = Dropout(dropout_rate, noise_BT2, numbers.layer)
        ctx = Context(
            attend,
            positions_of(self.decoder, kind.attention.positions, encoded, numbers.encoding),
            numbers.window,
            query_index_B,
            dispatch or Dispatch(),
            dropout,
            None if segments_BT is None else segments_BT > 0,
        )
        params = gather_weights(params, self.stage_axes["blocks"][kind])
        if self.decoder.forms:
            noise = None if numbers.layer is None else noise_BT2
            params = block_of_forms(self.decoder, kind, params, noise, numbers.layer)
        x_BTD = checkpoint_name(constrain_residual(stream.x_BTD), "block_in")
        x_BTD, means = self.stages.blocks[kind].apply(params, None, x_BTD, ctx)
        # the mechanism has called `attend`, which then holds the view with its keys and values
        return (x_BTD, attend.view), means

    def layers(
        self, params: Block, stream: Stream, cache: KeyValueView | None, query_index_B: jax.Array | None
    ) -> tuple[jax.Array, KeyValueView | None]:
        """The residual stream after the last layer, (B, T, D) or (B, 1, D), and the cache: see `hidden`.

        Args:
            params: the parameters "blocks".
        """
        count = len(self.decoder.layers)
        with jax.named_scope(LAYER_LOOP):
            if cache is None:
                x_BTD, _ = self.loop(params, stream, [None], [0] * count, None)
            else:
                views, view_of = cache.split(count)
                x_BTD, written = self.loop(params, stream, views, view_of, query_index_B)
                cache = cache.joined(written)
        # a loop whose last layer computed one position has returned one
        if query_index_B is not None and x_BTD.shape[1] > 1:
            x_BTD = at_position(x_BTD, query_index_B)
        return constrain_residual(x_BTD), cache

    def loop(
        self,
        params: Block,
        stream: Stream,
        views: Views,
        view_of: Sequence[int],
        query_index_B: jax.Array | None,
    ) -> Carries:
        """The loop over stacked layers. If they have several views, the view and the numbers of a layer are known when
        it is traced, and layers of one kind with different ones are traced apart.

        Args:
            view_of: the view of each layer.
            query_index_B: the position of each sequence whose result is used. This loop computes all positions; the
                last layer of a subclass's loop may compute only these.
        """

        def layer(kind: Layer, carry: Carry, block: Block, row: Rows) -> tuple[Carry, Outputs]:
            (x_BTD, view), (index, numbers) = carry, row
            carry, _ = self.layer(kind, block, stream._replace(x_BTD=x_BTD), numbers, view=view, index=index)
            return carry, (None, {})

        if len(views) == 1:

            def of_kind(kind: Kind, carry: Carry, block: Block, row: Rows) -> tuple[Carry, Outputs]:
                return layer(kind.layer, carry, block, row)

            rows, carry = (jnp.arange(len(view_of)), layer_numbers(self.decoder)), (stream.x_BTD, views[0])
            (x_BTD, view), _ = over_layers(
                self.layer_groups, of_kind, carry, params, rows, unroll=self.compute.scan_unroll
            )
            return x_BTD, [view]

        def keyed(kind: Kind, carry: Carries, block: Block, place: jax.Array) -> tuple[Carries, Outputs]:
            layer_kind, (at, numbers) = kind.layer
            x_BTD, views = carry
            (x_BTD, view), outputs = layer(layer_kind, (x_BTD, views[at]), block, (place, numbers))
            return (x_BTD, (*views[:at], view, *views[at + 1 :])), outputs

        keys = list(zip(view_of, static_numbers(self.decoder), strict=True))
        places = jnp.asarray([view_of[:number].count(at) for number, at in enumerate(view_of)])
        start: Carries = stream.x_BTD, tuple(views)
        return by_row(self.layer_groups, keys, keyed, start, params, places, unroll=self.compute.scan_unroll)

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


def constrain_residual(x_BTD: jax.Array) -> jax.Array:
    """The sharding of the residual stream between blocks."""
    return constrain(x_BTD, "batch", "block_seq", "act_embed")
