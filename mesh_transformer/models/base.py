"""What every model family is made of: Haiku stages, and the loop that runs them.

A family is one file that defines its stages and one line in `mesh_transformer.models.registry`. The stages are
separate `hk.transform`s so that the layers' parameters stack and one compiled block serves them all:
compile time does not grow with the number of layers.

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

from mesh_transformer.config import ModelConfig
from mesh_transformer.layers import at_position
from mesh_transformer.ops.cache import Keys, KVCache
from mesh_transformer.ops.linear import PackedBlock
from mesh_transformer.parallel.sharding import Axes, active, collect_axes, constrain, gather_weights, map_axes

Params = dict[str, Any]
"""{"embed": ..., "blocks": ..., "head": ...}; the arrays of "blocks" have a leading layer dimension."""


LAYER_LOOP = "blocks"  # in the op_name of the loop over layers, in profiles and compiled programs


class Stages(NamedTuple):
    """The parts of a decoder, as functions that make Haiku modules.

    embed(tokens_BT, positions_BT, keys_BS) -> (x_BTD, bias_BHTS or None); keys_BS: the positions of the keys
    block(x_BTD, positions_BT, bias_BHTS, cache, layer, only_B) -> (x_BTD, cache); with only_B, (B,) int32, one
        position of each sequence goes on (x_B1D), and of the others keys and values are kept
    final_norm(x_BTD) -> y_BTD
    unembed(y_BTD) -> logits_BTV, float32; linear but for a bias

    `same_input` names the Haiku modules of a block whose matrices multiply the same activations, in groups.
    """

    embed: Callable[..., Any]
    block: Callable[..., Any]
    final_norm: Callable[..., Any]
    unembed: Callable[..., Any]
    same_input: Sequence[Sequence[str]] = ()


class _Transformed(NamedTuple):
    embed: hk.Transformed
    block: hk.Transformed
    final_norm: hk.Transformed
    unembed: hk.Transformed


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model of any family: `init`, `apply`, and the names of its parameters' dimensions.

    `config.compute_dtype` and `config.remat` are resolved, not "auto" (see `mesh_transformer.platforms`).
    """

    config: ModelConfig
    functions: Stages

    @functools.cached_property
    def stages(self) -> _Transformed:
        """The stages with their `init` and `apply`."""
        return _Transformed(*(hk.transform(function) for function in self.functions[:4]))

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the arithmetic and of the cache."""
        return jnp.dtype(self.config.compute_dtype)

    def init(self, key: jax.Array) -> Params:
        """Float32 parameters. The values depend on the key alone, not on the mesh."""
        embed_key, block_key, head_key = jax.random.split(key, 3)
        tokens, x, positions = self._example()
        block_keys = jax.random.split(block_key, self.config.layers)
        return {
            "embed": self.stages.embed.init(embed_key, tokens, positions, positions),
            "blocks": jax.vmap(lambda k: self.stages.block.init(k, x, positions, None, None, 0))(block_keys),
            "head": {
                **self.stages.final_norm.init(head_key, x),
                **self.stages.unembed.init(head_key, x),
            },
        }

    @functools.cached_property
    def axes(self) -> Params:
        """The dimension names of each parameter: a tree like the parameters', its leaves tuples of names."""
        block = map_axes(lambda axes: ("layers", *axes), self._stage_axes["block"])
        return {"embed": self._stage_axes["embed"], "blocks": block, "head": self._stage_axes["head"]}

    @functools.cached_property
    def _stage_axes(self) -> Params:
        tokens, x, positions = self._example()
        return {
            "embed": collect_axes(lambda: self.functions.embed(tokens, positions, positions)),
            "block": collect_axes(lambda: self.functions.block(x, positions, None, None, 0)),
            "head": {
                **collect_axes(lambda: self.functions.final_norm(x)),
                **collect_axes(lambda: self.functions.unembed(x)),
            },
        }

    def _example(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        tokens = jnp.zeros((1, 1), jnp.int32)
        return tokens, jnp.zeros((1, 1, self.config.d_model), jnp.float32), tokens

    def cast(self, params: Params) -> Params:
        """Parameters in the compute dtype: done once a step, while they are still sharded."""
        return jax.tree.map(lambda p: p.astype(self.dtype), params)

    def without_padding(self, params: Params) -> Params:
        """The same tree with zeros in the vocabulary's padding rows, whatever they hold: these rows belong to no norm."""
        n_vocab = self.config.n_vocab

        def live(axes: Axes, x: jax.Array) -> jax.Array:
            if "vocab" not in axes:
                return x
            rows = jax.lax.broadcasted_iota(jnp.int32, x.shape, axes.index("vocab"))
            return jnp.where(rows < n_vocab, x, 0)

        if self.config.padded_vocab == n_vocab:
            return params
        return jax.tree.map(live, self.axes, params, is_leaf=lambda node: isinstance(node, tuple))

    def new_cache(self, slots: int, length: int, *, stacked: bool = True) -> KVCache:
        """An empty cache for `slots` sequences of up to `length` positions; `stacked` as the parameters' layers are."""
        c = self.config
        return KVCache.zeros(c.layers, slots, c.n_heads, length, c.d_head, self.dtype, stacked=stacked)

    def apply(
        self,
        params: Params,
        tokens_BT: jax.Array,
        cache: Keys | None = None,
        start_B: jax.Array | None = None,
        select_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Keys | None]:
        """Logits of the next token, for training, prefill and decode alike.

        Args:
            params: in the compute dtype.
            tokens_BT: int32 tokens; at positions 0 .. T-1, or start_B + 0 .. T-1.
            cache: keys and values of earlier positions; the new ones are added to it.
            start_B: int32 position of each sequence's first token; needs a cache.
            select_B: int32 index into T; only that position of each sequence goes through the head.

        Returns:
            logits (B, T, V), or (B, 1, V) with select_B; float32, -inf in the rows beyond n_vocab; and the cache.
        """
        x_BTD, cache = self.hidden(params, tokens_BT, cache, start_B, select_B)
        return self.logits(self.gathered_head(params), x_BTD), cache

    def hidden(
        self,
        params: Params,
        tokens_BT: jax.Array,
        cache: Keys | None = None,
        start_B: jax.Array | None = None,
        select_B: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Keys | None]:
        """The residual stream, (B, T, D) or (B, 1, D), after the last block, and the cache: `apply` without its head.

        `positions_BT` takes the place of `start_B` where positions do not count up from it; it needs a cache.
        """
        if positions_BT is None:
            positions_BT = jnp.arange(tokens_BT.shape[1])[None]
            if start_B is not None:
                positions_BT = positions_BT + start_B[:, None]
            elif cache is not None:
                positions_BT = jnp.broadcast_to(positions_BT, tokens_BT.shape)
        keys_BS = positions_BT if cache is None else cache.key_positions(positions_BT)
        embed_params = gather_weights(params["embed"], self._stage_axes["embed"])
        x_BTD, bias = self.stages.embed.apply(embed_params, None, tokens_BT, positions_BT, keys_BS)
        return self._blocks(params["blocks"], x_BTD.astype(self.dtype), positions_BT, bias, cache, select_B)

    def gathered_head(self, params: Params) -> Params:
        """The head's parameters as `logits` takes them: whole over fsdp."""
        return gather_weights(params["head"], self._stage_axes["head"])

    def logits(self, head_params: Params, x_BTD: jax.Array) -> jax.Array:
        """The head on any positions: (B, T, D) -> (B, T, V) float32, -inf in the rows beyond n_vocab."""
        return self.unembed(head_params, self.final_norm(head_params, x_BTD))

    def final_norm(self, head_params: Params, x_BTD: jax.Array) -> jax.Array:
        """The first half of the head: (B, T, D) -> (B, T, D)."""
        return self.stages.final_norm.apply(head_params, None, x_BTD)

    def unembed(self, head_params: Params, y_BTD: jax.Array) -> jax.Array:
        """The second half of the head: `logits` of what the first gave."""
        logits_BTV = constrain(self.stages.unembed.apply(head_params, None, y_BTD), "batch", "seq", "vocab")
        return _mask_padding(logits_BTV, self.config.n_vocab)

    def _blocks(
        self,
        params: Params,
        x_BTD: jax.Array,
        positions: jax.Array,
        bias: jax.Array | None,
        cache: Keys | None,
        select_B: jax.Array | None,
    ) -> tuple[jax.Array, Keys | None]:
        def body(carry: Any, layer: Any, only_B: jax.Array | None = None) -> tuple[Any, None]:
            x_BTD, cache = carry
            block_params, index = layer
            if isinstance(block_params, PackedBlock):
                block_params = block_params.unpack()
            block_params = gather_weights(block_params, self._stage_axes["block"])
            x_BTD = checkpoint_name(constrain_residual(x_BTD), "block_in")
            return self.stages.block.apply(
                block_params, None, x_BTD, positions, bias, cache, index, only_B
            ), None

        if cache is None:
            body = rematerialise(body, self.config.remat)
        with jax.named_scope(LAYER_LOOP):
            if isinstance(params, tuple):
                one = jax.jit(body)  # layers of one shape are traced once
                views = [None] * len(params) if cache is None else cache.layers(len(params))
                for index, block in enumerate(params):
                    only_B = select_B if cache is not None and index == len(params) - 1 else None
                    (x_BTD, views[index]), _ = one((x_BTD, views[index]), (block, 0), only_B)
                cache = None if cache is None else cache.with_layers(views)
            else:
                layers = jnp.arange(self.config.layers)
                (x_BTD, cache), _ = jax.lax.scan(
                    body, (x_BTD, cache), (params, layers), unroll=self.config.scan_unroll
                )
        if select_B is not None and x_BTD.shape[1] > 1:
            x_BTD = at_position(x_BTD, select_B)
        return constrain_residual(x_BTD), cache


def constrain_residual(x_BTD: jax.Array) -> jax.Array:
    """The sharding of the residual stream between blocks."""
    return constrain(x_BTD, "batch", "block_seq", "act_embed")


def rematerialise(body: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Wrap a layer so that the backward pass keeps what the named policy says and recomputes the rest.

    Gathered weights are never kept, whatever the policy: that would undo fsdp.
    """
    policies = jax.checkpoint_policies
    if policy == "none":
        partition = active()
        if partition is None or not partition.splits_weights:
            return body
        return jax.checkpoint(body, policy=_everything_but_constrained)
    return jax.checkpoint(
        body,
        policy={
            "full": policies.save_only_these_names("block_in"),
            "save_attn": policies.save_only_these_names("block_in", "attn_out"),
            "save_matmuls": policies.save_only_these_names("block_in", "attn_out", "mlp_hidden"),
        }[policy],
    )


def _everything_but_constrained(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name != "sharding_constraint"


def _mask_padding(logits_BTV: jax.Array, n_vocab: int) -> jax.Array:
    if logits_BTV.shape[-1] == n_vocab:
        return logits_BTV
    rows = jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, 2)
    return jnp.where(rows < n_vocab, logits_BTV, -jnp.inf)
