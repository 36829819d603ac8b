"""A model of one's own as three functions of Haiku modules: embedding, one layer, head and loss.

Shapes: B sequences (or other rows of data) of a microbatch; x is any array that begins with B, such as (B, T, D); L
layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp

from mesh_transformer.models.stack import Batch, Means, Results, Stream
from mesh_transformer.parallel.sharding import AxesTree, Block, Params, collect_axes, gather_weights, map_axes, use


@dataclasses.dataclass(frozen=True, eq=False)
class HaikuModel:
    """The parameters of a model, and the functions `embed`, `layer` and `loss` of `train.Parts`.

    All parameters have dimension names (`with_axes`). The parameters of the layers are stacked, so that one compiled
    layer serves all. Each function gathers the weights that fsdp splits just before their use.
    """

    embedding: Callable[[Batch], jax.Array]
    """Microbatch -> x."""
    block: Callable[[jax.Array], jax.Array | tuple[jax.Array, Means]]
    """One layer: x -> x, or x and named means over its tokens for `ModelFunctions.layer_loss` and
    `ModelFunctions.metrics`."""
    head: Callable[[jax.Array, Batch], tuple[jax.Array, Results]]
    """(x, microbatch) -> a float32 scalar, a sum over rows or positions; and results for the metrics, or None."""
    layers: int
    """L."""
    example: Batch
    """A microbatch: arrays or `jax.ShapeDtypeStruct`. Only shapes and dtypes are read."""

    def init(self, key: jax.Array) -> Params:
        """{"embed": ..., "blocks": ..., "head": ...}; the arrays of "blocks" have a leading dimension L."""
        embed_key, block_key, head_key = jax.random.split(key, 3)
        with use(None):
            batch, x = self._examples()
            return {
                "embed": self._embed.init(embed_key, batch),
                "blocks": jax.vmap(lambda k: self._block.init(k, x))(jax.random.split(block_key, self.layers)),
                "head": self._head.init(head_key, x, batch),
            }

    @functools.cached_property
    def axes(self) -> Params:
        """The dimension names of each parameter: a tree like the result of `init`, with tuples of names as leaves."""
        blocks = map_axes(lambda axes: ("layers", *axes), self._stage_axes["block"])
        return {"embed": self._stage_axes["embed"], "blocks": blocks, "head": self._stage_axes["head"]}

    def embed(self, params: Params, batch: Batch) -> Stream:
        """`ModelFunctions.embed`."""
        return Stream(self._embed.apply(gather_weights(params, self._stage_axes["embed"]), None, batch))

    def layer(self, params: Block, stream: Stream, own: None = None) -> tuple[jax.Array, Means]:
        """`ModelFunctions.layer`."""
        outputs = self._block.apply(gather_weights(params, self._stage_axes["block"]), None, stream.x_BTD)
        return outputs if isinstance(outputs, tuple) else (outputs, {})

    def loss(self, params: Params, x: jax.Array, batch: Batch) -> tuple[jax.Array, Results]:
        """`ModelFunctions.loss`, from the parameters of the whole model."""
        return self._head.apply(gather_weights(params["head"], self._stage_axes["head"]), None, x, batch)

    @functools.cached_property
    def _stage_axes(self) -> dict[str, AxesTree]:
        with use(None):
            batch, x = self._examples()
            return {
                "embed": collect_axes(lambda: self.embedding(batch)),
                "block": collect_axes(lambda: self.block(x)),
                "head": collect_axes(lambda: self.head(x, batch)),
            }

    def _examples(self) -> tuple[Batch, jax.Array]:
        """A microbatch and x, of zeros."""

        def x(key: jax.Array, batch: Batch) -> jax.Array:
            return self._embed.apply(self._embed.init(key, batch), None, batch)

        shapes = self.example, jax.eval_shape(x, jax.random.key(0), self.example)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    @functools.cached_property
    def _embed(self) -> hk.Transformed:
        return hk.transform(self.embedding)

    @functools.cached_property
    def _block(self) -> hk.Transformed:
        return hk.transform(self.block)

    @functools.cached_property
    def _head(self) -> hk.Transformed:
        return hk.transform(self.head)
