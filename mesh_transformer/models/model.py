"""A model of any family: parameters, the names of their dimensions, and the loop over layers.

Embedding, block and head (models/decoder.py) are separate `hk.transform`s. The parameters of a module are stacked by
run (`spec.Decoder.runs`), and one compiled block serves all layers of a kind: compile time does not grow with their
number.

Shapes: B sequences (or cache slots), T positions, S key positions, D residual width, V padded vocabulary rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.config import ComputeConfig
from mesh_transformer.models import decoder as modules
from mesh_transformer.models.feed_forward import is_router
from mesh_transformer.models.forward import constrain_residual, layers
from mesh_transformer.models.modules import Context, Dropout, Means
from mesh_transformer.models.numbers import LayerNumbers, encoded_positions, positions_of
from mesh_transformer.models.stack import Kind, joined_runs, rows_by_run
from mesh_transformer.ops.attend import context
from mesh_transformer.ops.attend.cached import KeyValueView, KVCache, ring_length
from mesh_transformer.ops.attend.causal import Attend
from mesh_transformer.ops.experts import Dispatch
from mesh_transformer.ops.linear import PackedBlock
from mesh_transformer.ops.positions import EncodedPositions
from mesh_transformer.parallel.sharding import Axes, Block, Params, constrain, gather_weights
from mesh_transformer.spec import Arrays, CacheEntry, Decoder, Layer, Run, in_run

# The named activations of a layer that the backward pass keeps, by the value of `compute.remat`.
KEPT = {
    "full": ["block_in"],
    "save_attn": ["block_in", "attn_out"],
    "save_matmuls": ["block_in", "attn_out", "mlp_hidden"],
}


class _Stages(NamedTuple):
    """The `hk.transform`s of the Haiku modules."""

    embed: hk.Transformed
    blocks: dict[Layer, hk.Transformed]
    final_norm: hk.Transformed
    unembed: hk.Transformed


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """`init`, `apply`, and the names of the parameters' dimensions.

    No field of `compute` is "auto": `mesh_transformer.platforms` has resolved them. The groups of layers of a pipeline,
    in all rounds of all stages, are `stages_of_pipeline`. They share out one run (`Decoder.shared_run`).
    """

    decoder: Decoder
    compute: ComputeConfig
    stages_of_pipeline: int = 1

    @functools.cached_property
    def stages(self) -> _Stages:
        """The `hk.transform` of each stage."""
        of = functools.partial
        return _Stages(
            hk.transform(of(modules.embed, self.decoder)),
            {kind: hk.transform(of(modules.block, self.decoder, kind)) for kind in self.decoder.kinds},
            hk.transform(of(modules.final_norm, self.decoder)),
            hk.transform(of(modules.unembed, self.decoder)),
        )

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the arithmetic and of the cache."""
        return jnp.dtype(self.compute.dtype)

    def init(self, key: jax.Array) -> Params:
        """Float32 parameters. The values depend only on the key, not on the mesh."""
        embed_key, block_key, head_key = jax.random.split(key, 3)
        runs, keys = self.decoder.runs, jax.random.split(block_key, len(self.decoder.layers))
        blocks = [self._init_run(run, rows) for run, rows in zip(runs, rows_by_run(keys, runs), strict=True)]
        return {
            "embed": _drawn(self.decoder.embedding_arrays, embed_key),
            "blocks": joined_runs(blocks),
            "head": _drawn(self.decoder.head_arrays, head_key),
        }

    def _init_run(self, run: Run[Layer], keys: jax.Array) -> Block:
        stacks: dict[str, list[tuple[list[int], Params]]] = {}
        for kind in dict.fromkeys(run.period):
            layers = [number for number, other in enumerate(run.kinds) if other is kind]
            init = jax.vmap(functools.partial(_drawn, self.decoder.layer_arrays(kind)))
            stacked: Block = init(keys if len(layers) == run.layers else keys[np.array(layers)])
            for module, leaves in stacked.items():
                stacks.setdefault(module, []).append((layers, leaves))
        return {module: _in_order(of_kinds) for module, of_kinds in stacks.items()}

    @functools.cached_property
    def axes(self) -> Params:
        """The dimension names of each parameter: a tree like the parameters' with tuples of names as leaves."""
        arrays = self.decoder.arrays(self.stages_of_pipeline)
        return _by_stage({path: array.axes for path, array in arrays.items()})

    @property
    def shapes(self) -> Params:
        """What `init` returns, as `jax.ShapeDtypeStruct`."""
        arrays = self.decoder.arrays()
        return _by_stage({path: jax.ShapeDtypeStruct(array.shape, jnp.float32) for path, array in arrays.items()})

    @functools.cached_property
    def stage_axes(self) -> Params:
        """The dimension names of each stage's parameters: one layer of each kind; with a tied table for the head."""
        embed, head = _axes(self.decoder.embedding_arrays), _axes(self.decoder.head_arrays)
        return {
            "embed": embed,
            "blocks": {kind: _axes(self.decoder.layer_arrays(kind)) for kind in self.decoder.kinds},
            "head": {**head, "tokens": {"w": embed["tokens"]["w"]}} if self.decoder.tied else head,
        }

    @functools.cached_property
    def runs(self) -> tuple[Run[Kind], ...]:
        """The layers by their kinds. `Kind.layer` is the specification of a layer."""
        kinds = {kind: Kind(kind, tuple(modules)) for kind, modules in self.stage_axes["blocks"].items()}
        return tuple(Run(tuple(kinds[kind] for kind in run.period), run.repeats) for run in self.decoder.runs)

    @property
    def rows_by_layer(self) -> list[dict[str, tuple[str, int]]]:
        """For each layer, by module: the name of its stack in "blocks", and the row of the layer."""
        found: list[dict[str, tuple[str, int]]] = []
        for number, run in enumerate(self.runs):
            used: dict[str, int] = {}
            for kind in run.kinds:
                layer = {}
                for module in kind.modules or ():
                    layer[module] = in_run(module, number, len(self.runs)), used.get(module, 0)
                    used[module] = used.get(module, 0) + 1
                found.append(layer)
        return found

    def cast(self, params: Params) -> Params:
        """The parameters in the compute dtype. A step casts once, while they are sharded."""
        return jax.tree.map(lambda p, dtype: p.astype(dtype), params, self.dtypes(params, self.dtype))

    def dtypes(self, params: Params, dtype: jnp.dtype) -> Params:
        """The dtype of each parameter for arithmetic in `dtype`: float32 for a router."""

        def dtype_of(path: jax.tree_util.KeyPath, _: jax.Array) -> jnp.dtype:
            modules = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            return jnp.dtype(jnp.float32) if any(map(is_router, modules)) else dtype

        return jax.tree_util.tree_map_with_path(dtype_of, params)

    def without_padding(self, params: Params) -> Params:
        """The parameters with zeros in the vocabulary's padding rows, so that a norm does not count these rows; nor the
        biases of routers, which no gradient trains."""

        def zero_padding(x: jax.Array, axes: Axes) -> jax.Array:
            return self._mask_padding(x, axes.index("vocab"), 0) if "vocab" in axes else x

        counted = jax.tree.map(zero_padding, params, self.axes)
        blocks = {
            module: {**leaves, "bias": jnp.zeros_like(leaves["bias"])}
            for module, leaves in counted["blocks"].items()
            if is_router(module) and "bias" in leaves
        }
        return {**counted, "blocks": {**counted["blocks"], **blocks}}

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
        return self._mask_padding(logits_BTV, 2, -jnp.inf)

    def _mask_padding(self, x: jax.Array, dimension: int, value: float) -> jax.Array:
        """x with `value` in the vocabulary's padding; `dimension` is the vocabulary."""
        if self.decoder.padded_vocab == self.decoder.n_vocab:
            return x
        rows = jax.lax.broadcasted_iota(jnp.int32, x.shape, dimension)
        return jnp.where(rows < self.decoder.n_vocab, x, value)

    def encoded_positions(self, positions_BT: jax.Array) -> tuple[EncodedPositions, ...]:
        """The arrays of the position encodings: see `numbers.encoded_positions`."""
        return encoded_positions(self.decoder, positions_BT)


def _drawn(arrays: Arrays, key: jax.Array) -> Params:
    """Fresh values, float32. Each array that is not constant has the next key."""
    drawn = {}
    for path, array in arrays.items():
        if array.stddev is None:
            drawn[path] = jnp.full(array.shape, array.constant)
        else:
            key, array_key = jax.random.split(key)
            drawn[path] = array.stddev * jax.random.truncated_normal(array_key, -2, 2, array.shape)
    return _by_module(drawn)


def _axes(arrays: Arrays) -> Params:
    return _by_module({path: array.axes for path, array in arrays.items()})


def _by_stage(values: Mapping[str, object]) -> Params:
    """Values by path as a tree: by stage, module and name."""
    stages: dict[str, dict[str, object]] = {}
    for path, value in values.items():
        stage, _, inner = path.partition("/")
        stages.setdefault(stage, {})[inner] = value
    return {stage: _by_module(inner) for stage, inner in stages.items()}


def _by_module(values: Mapping[str, object]) -> Params:
    """Values by path as a tree: by module and name."""
    tree: Params = {}
    for path, value in values.items():
        module, _, name = path.rpartition("/")
        tree.setdefault(module, {})[name] = value
    return tree


def _in_order(some: list[tuple[list[int], Params]]) -> Params:
    """The arrays of a module that several kinds have, stacked by layer. For each kind: the layers, and the arrays."""
    if len(some) == 1:
        return some[0][1]
    order = np.argsort([layer for layers, _ in some for layer in layers])
    return jax.tree.map(lambda *stacks: jnp.concatenate(stacks)[order], *(leaves for _, leaves in some))
