"""A model of any family: parameters, the names of their dimensions, and the loop over layers.

Embedding, block and head (models/decoder.py) are separate `hk.transform`s. The parameters of a module are stacked over
the layers that have it, and one compiled block serves all layers of a kind: compile time does not grow with their
number.

Shapes: B sequences (or cache slots), T positions, S key positions, D residual width, V padded vocabulary rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.config import ComputeConfig
from mesh_transformer.models import decoder as modules
from mesh_transformer.models.feed_forward import ROUTER
from mesh_transformer.models.loops import Means, Members, in_runs, scan_layers, unrolled
from mesh_transformer.models.modules import Context, at_position
from mesh_transformer.ops.attend import context
from mesh_transformer.ops.attend.cached import Cached, KeyValueView, KVCache, ring_length
from mesh_transformer.ops.attend.causal import Causal
from mesh_transformer.ops.attend.packed import PackedView
from mesh_transformer.ops.linear import PackedBlock
from mesh_transformer.ops.rotary import Rotation, rotation
from mesh_transformer.parallel.sharding import (
    Axes,
    collect_axes,
    constrain,
    gather_weights,
)
from mesh_transformer.spec import Decoder, Layer

Params = dict[str, Any]
"""{"embed": ..., "blocks": ..., "head": ...}; the arrays of "blocks" have a leading dimension: the layers that have
the module, which are all layers in most models (`Model.members`)."""

# The named activations of a layer that the backward pass keeps, by the value of `compute.remat`.
KEPT = {
    "full": ["block_in"],
    "save_attn": ["block_in", "attn_out"],
    "save_matmuls": ["block_in", "attn_out", "mlp_hidden"],
}
# The window of a layer without one, among layers that have windows: more than any position.
NO_WINDOW = 1 << 30
# The name of the loop over layers in the op_name of compiled programs and in profiles.
LAYER_LOOP = "blocks"


class _Stages(NamedTuple):
    """The functions that make the Haiku modules, or their `hk.transform`s."""

    embed: Any
    # by kind of layer
    blocks: Any
    final_norm: Any
    unembed: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """`init`, `apply`, and the names of the parameters' dimensions.

    No field of `compute` is "auto": `mesh_transformer.platforms` has resolved them.
    """

    decoder: Decoder
    compute: ComputeConfig

    @functools.cached_property
    def _functions(self) -> _Stages:
        of = functools.partial
        return _Stages(
            of(modules.embed, self.decoder),
            {kind: of(modules.block, self.decoder, kind) for kind in self.decoder.kinds},
            of(modules.final_norm, self.decoder),
            of(modules.unembed, self.decoder),
        )

    @functools.cached_property
    def stages(self) -> _Stages:
        """The `hk.transform` of each stage."""
        one, own = hk.transform, self._functions
        blocks = {kind: one(block) for kind, block in own.blocks.items()}
        return _Stages(one(own.embed), blocks, one(own.final_norm), one(own.unembed))

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the arithmetic and of the cache."""
        return jnp.dtype(self.compute.dtype)

    def init(self, key: jax.Array) -> Params:
        """Float32 parameters. The values depend only on the key, not on the mesh."""
        embed_key, block_key, head_key = jax.random.split(key, 3)
        tokens, x, ctx = self._example()
        head = {**self.stages.final_norm.init(head_key, x), **self.stages.unembed.init(head_key, x)}
        return {
            "embed": self.stages.embed.init(embed_key, tokens, tokens),
            "blocks": self._init_blocks(block_key, x, ctx),
            "head": self._own_head(head),
        }

    def _init_blocks(self, key: jax.Array, x_BTD: jax.Array, ctx: Context) -> Params:
        layers = [layer.kind for layer in self.decoder.layers]
        keys = jax.random.split(key, len(layers))
        found: dict[str, list[tuple[list[int], Any]]] = {}
        for kind, transform in self.stages.blocks.items():
            own = [number for number, other in enumerate(layers) if other == kind]
            init = jax.vmap(lambda k, transform=transform: transform.init(k, x_BTD, ctx))
            for module, leaves in init(keys if len(own) == len(layers) else keys[np.array(own)]).items():
                found.setdefault(module, []).append((own, leaves))
        return {module: _in_order(some) for module, some in found.items()}

    @functools.cached_property
    def axes(self) -> Params:
        """The dimension names of each parameter: a tree like the parameters' with tuples of names as leaves."""
        stages = self.stage_axes
        modules = functools.reduce(lambda a, b: {**a, **b}, stages["blocks"].values())
        members = self.members or dict.fromkeys(modules, range(len(self.decoder.layers)))
        stacks = {name: self.decoder.stack_axis(members[name]) for name in modules}
        blocks = {
            name: {leaf: (stacks[name], *axes) for leaf, axes in leaves.items()} for name, leaves in modules.items()
        }
        return {"embed": stages["embed"], "blocks": blocks, "head": self._own_head(stages["head"])}

    @functools.cached_property
    def stage_axes(self) -> Params:
        """The dimension names of each stage's parameters: one layer of each kind; with a tied table for the head."""
        tokens, x, ctx = self._example()
        functions = self._functions
        return {
            "embed": collect_axes(lambda: functions.embed(tokens, tokens)[0]),
            "blocks": {
                kind: collect_axes(functools.partial(block, x, ctx)) for kind, block in functions.blocks.items()
            },
            "head": {
                **collect_axes(lambda: functions.final_norm(x)),
                **collect_axes(lambda: functions.unembed(x)),
            },
        }

    @functools.cached_property
    def members(self) -> Members | None:
        """The layers that have each module; None: all layers are of one kind."""
        kinds = self.stage_axes["blocks"]
        if len(kinds) == 1:
            return None
        layers = [layer.kind for layer in self.decoder.layers]
        modules = dict.fromkeys(module for kind in kinds.values() for module in kind)
        return {m: [number for number, kind in enumerate(layers) if m in kinds[kind]] for m in modules}

    def _kind(self, block: Params) -> Layer:
        """The kind of a layer with these modules."""
        kinds = self.stage_axes["blocks"]
        return next(kind for kind in kinds if len(kinds) == 1 or kinds[kind].keys() == block.keys())

    def _own_head(self, head: Any) -> Any:
        """The head's parameters without a table that is tied to the embedding."""
        return {module: leaves for module, leaves in head.items() if module != "tokens"}

    def _example(self) -> tuple[jax.Array, jax.Array, Context]:
        tokens = jnp.zeros((1, 1), jnp.int32)
        x_BTD = jnp.zeros((1, 1, self.decoder.d_model), jnp.float32)
        return tokens, x_BTD, Context(Causal(), self.rotation(tokens))

    def cast(self, params: Params) -> Params:
        """The parameters in the compute dtype. A step casts once, while they are sharded."""
        return jax.tree.map(lambda p, dtype: p.astype(dtype), params, self.dtypes(params, self.dtype))

    def dtypes(self, params: Params, dtype: jnp.dtype) -> Params:
        """The dtype of each parameter for arithmetic in `dtype`: that of a router is float32."""

        def dtype_of(path: Any, _: Any) -> jnp.dtype:
            names = {key.key for key in path if isinstance(key, jax.tree_util.DictKey)}
            return jnp.dtype(jnp.float32) if ROUTER in names else dtype

        return jax.tree_util.tree_map_with_path(dtype_of, params)

    def without_padding(self, params: Params) -> Params:
        """The parameters with zeros in the vocabulary's padding rows, so that a norm does not count these rows; nor the
        biases of routers, which no gradient trains."""

        def zero_padding(x: jax.Array, axes: Axes) -> jax.Array:
            return self._mask_padding(x, axes.index("vocab"), 0) if "vocab" in axes else x

        counted = jax.tree.map(zero_padding, params, self.axes)
        if "bias" not in counted["blocks"].get(ROUTER, {}):
            return counted
        router = {**counted["blocks"][ROUTER], "bias": jnp.zeros_like(counted["blocks"][ROUTER]["bias"])}
        return {**counted, "blocks": {**counted["blocks"], ROUTER: router}}

    def new_cache(self, slots: int, length: int, *, longest_chunk: int | None = None, stacked: bool = True) -> KVCache:
        """An empty cache for `slots` sequences of up to `length` positions.

        Args:
            longest_chunk: the largest number of positions in one call of `apply`; None: `length`. The shorter it is,
                the fewer positions the layers with a window keep.
            stacked: whether the layers of the parameters are.
        """
        chunk = length if longest_chunk is None else longest_chunk
        lengths = [ring_length(length, layer.attention.window, chunk) for layer in self.decoder.layers]
        entries = self.decoder.layer.attention.cache_entries
        return KVCache.zeros(lengths, slots, entries, self.dtype, stacked=stacked)

    def map_cache(self, function: Callable[[Any, Axes], Any], cache: KVCache) -> KVCache:
        """The cache with function(array, names of its dimensions) in place of each array."""
        return cache.map(self.decoder.layer.attention.cache_entries, function)

    def packed_view(self, ends_BT: jax.Array) -> PackedView:
        """The view that rows of packed trees use in place of a cache; `ends_BT` as in `PackedView`."""
        return PackedView.of(ends_BT, self.decoder.layer.attention.keys_and_values, self.dtype)

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
            cache: keys and values of earlier positions. Those of the tokens are written to it.
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
        return self._blocks(params["blocks"], x_BTD, positions_BT, bias_BHTS, cache, query_index_B)

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
            params: those of "embed", in the compute dtype.
            keys_BS: int32: positions of the keys; None: those of the tokens.
        """
        params = gather_weights(params, self.stage_axes["embed"])
        x_BTD, bias = self.stages.embed.apply(params, None, tokens_BT, positions_BT)
        bias_BHTS = bias and bias(positions_BT, positions_BT if keys_BS is None else keys_BS)
        return x_BTD, bias_BHTS

    def layer(self, params: Params | PackedBlock, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Means]:
        """One layer, from its own parameters: (B, T, D) -> (B, T or 1, D), and named means."""
        if isinstance(params, PackedBlock):
            params = params.unpack()
        kind = self._kind(params)
        params = gather_weights(params, self.stage_axes["blocks"][kind])
        x_BTD = checkpoint_name(constrain_residual(x_BTD), "block_in")
        return self.stages.blocks[kind].apply(params, None, x_BTD, ctx)

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
        return self._mask_padding(logits_BTV, 2, -jnp.inf)

    def _mask_padding(self, x: jax.Array, dimension: int, value: float) -> jax.Array:
        """x with `value` in the vocabulary's padding; `dimension` is the vocabulary."""
        if self.decoder.padded_vocab == self.decoder.n_vocab:
            return x
        rows = jax.lax.broadcasted_iota(jnp.int32, x.shape, dimension)
        return jnp.where(rows < self.decoder.n_vocab, x, value)

    def rotation(self, positions_BT: jax.Array) -> Rotation | None:
        """The rotary angles of the positions; None for a model without rotary encoding."""
        rotary = self.decoder.layer.attention.rotary
        return rotation(rotary, positions_BT, self.decoder.seq) if rotary else None

    def windows(self) -> jax.Array | None:
        """The window of each layer, int32 (L,); None if no layer has one."""
        windows = [NO_WINDOW if window is None else window for window in self.decoder.windows]
        return jnp.asarray(windows, jnp.int32) if windows else None

    def _blocks(
        self,
        params: Params,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        bias_BHTS: jax.Array | None,
        cache: KeyValueView | None,
        query_index_B: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        angles, windows_L = self.rotation(positions_BT), self.windows()

        def body(carry: Any, layer: Any, query_index_B: jax.Array | None = None) -> tuple[Any, Means]:
            x_BTD, view = carry
            block_params, (index, window) = layer
            attend = _bind(view, index, positions_BT, bias_BHTS, query_index_B)
            x_BTD, aux = self.layer(block_params, x_BTD, Context(attend, angles, window, query_index_B))
            return (x_BTD, attend.view), aux

        unroll = self.compute.scan_unroll
        with jax.named_scope(LAYER_LOOP):
            if isinstance(params, tuple):
                x_BTD, cache = unrolled(body, params, windows_L, x_BTD, cache, query_index_B)
            elif cache is not None and not cache.stacked:
                windows = self.decoder.windows
                x_BTD, cache = in_runs(body, params, self.members, windows, x_BTD, cache, unroll)
            else:
                own = jnp.arange(len(self.decoder.layers)), windows_L
                (x_BTD, cache), _ = scan_layers(body, (x_BTD, cache), params, own, self.members, unroll)
        if query_index_B is not None and x_BTD.shape[1] > 1:
            x_BTD = at_position(x_BTD, query_index_B)
        return constrain_residual(x_BTD), cache


def _in_order(some: list[tuple[list[int], Any]]) -> Any:
    """The arrays of a module that several kinds of layers have, stacked by layer. Given: their layers, and arrays."""
    if len(some) == 1:
        return some[0][1]
    order = np.argsort([layer for layers, _ in some for layer in layers])
    return jax.tree.map(lambda *stacks: jnp.concatenate(stacks)[order], *(leaves for _, leaves in some))


def _bind(
    view: KeyValueView | None,
    layer: jax.Array,
    positions_BT: jax.Array,
    bias_BHTS: jax.Array | None,
    query_index_B: jax.Array | None,
) -> context.Whole | Cached:
    """The attention of one layer: to the sequence itself, or to the keys and values of a view."""
    if view is None:
        return context.attention(bias_BHTS)
    if query_index_B is None:
        return Cached(view, layer, positions_BT, positions_BT, bias_BHTS)
    if bias_BHTS is not None:
        bias_BHTS = at_position(bias_BHTS.swapaxes(1, 2), query_index_B).swapaxes(1, 2)
    return Cached(view, layer, positions_BT, at_position(positions_BT, query_index_B), bias_BHTS)


def constrain_residual(x_BTD: jax.Array) -> jax.Array:
    """The sharding of the residual stream between blocks."""
    return constrain(x_BTD, "batch", "block_seq", "act_embed")
