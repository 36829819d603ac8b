"""The forward pass of a stage of a pipeline (train/pipeline.py has the schedule).

Shapes: M microbatches, B sequences of one, T positions, D residual width, L layers, v rounds, C layers of a group.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesh_transformer.errors import UserError
from mesh_transformer.models.haiku_model import Stream
from mesh_transformer.models.loops import scan_layers
from mesh_transformer.models.model import LAYER_LOOP, Params
from mesh_transformer.models.modules import Means
from mesh_transformer.parallel.pipeline import Item, Stages, Ticks, at, put
from mesh_transformer.parallel.sharding import constrain
from mesh_transformer.train.schedule import Parts, rematerialize


class Layers(NamedTuple):
    """What differs between layers, each array folded: (v, L / v, ...); on a stage, (v, C, ...)."""

    params: Params
    own: Any

    def at(self, turn: Any, index: Any) -> Layers:
        """One layer of a round."""
        return jax.tree.map(lambda x: at(x, turn, index), self)


class Losses(NamedTuple):
    """What `Parts.loss` yields: sums over this stage's shares, and the results of all shares, (M, B, T, ...); and the
    means of this stage's layers, (M, v, C, ...)."""

    losses_M: jax.Array
    results: Any
    means: Means

    def by_layer(self) -> Means:
        """The means as the stages are joined: (v, C, M, ...)."""
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), self.means)


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """The forward pass on one stage, inside of `Stages.run`."""

    parts: Parts
    stages: Stages
    ticks: Ticks
    # what every stage has: "embed", "head", and if there are any, the "leading" layers
    tables: Params
    # what of `Parts.own` the leading layers read
    leading_own: Any
    layers: Layers
    # all microbatches
    batch: Any

    @property
    def group(self) -> int:
        """C."""
        return jax.tree.leaves(self.layers)[0].shape[1]

    def axes(self, blocks: Params) -> Params:
        """The dimension names of the parameters of some modules of "blocks"."""
        return {name: self.parts.axes["blocks"][name] for name in blocks}

    def microbatch(self, item: Item) -> Any:
        """The microbatch of an item."""
        return jax.tree.map(lambda x: x[item.microbatch], self.batch)

    def layer(self, layer: Layers, stream: Stream) -> tuple[jax.Array, Means]:
        """One layer."""
        return self.parts.layer(layer.params, stream, layer.own)

    def enter(self, item: Item) -> Stream:
        """What the layers of the first stage read of a microbatch."""
        stream = self.parts.embed(self.tables["embed"], self.microbatch(item))
        if "leading" in self.tables:
            stream = stream._replace(x_BTD=self.pass_leading(self.tables["leading"], stream))
        return stream

    def pass_leading(self, params: Params, stream: Stream) -> jax.Array:
        """The leading layers: (B, T, D) -> (B, T, D).

        Raises:
            UserError: they have means, which no stage would know.
        """

        def layer(x_BTD: jax.Array, of_layer: Any) -> tuple[jax.Array, Means]:
            return self.parts.layer(of_layer[0], stream._replace(x_BTD=x_BTD), of_layer[1])

        layer = rematerialize(layer, ())
        with jax.named_scope(LAYER_LOOP):
            x_BTD, means = scan_layers(layer, stream.x_BTD, params, self.leading_own, None, self.parts.unroll)
        if means:
            raise UserError(
                f"the layers before those that the stages of a pipeline share out have means: {', '.join(sorted(means))}"
            )
        return x_BTD

    def pass_layers(self, tick: jax.Array, received_BTD: jax.Array) -> tuple[jax.Array, jax.Array, Means]:
        """The layers of this stage in a tick: (B, T, D) -> (B, T, D), the input of each layer, (C, B, T, D), and its
        means, (C, ...)."""
        item = self.ticks.forward(tick, self.stages.index)
        stream = self.enter(item)
        x_BTD = jnp.where((self.stages.index == 0) & (item.round == 0), stream.x_BTD, received_BTD)

        def layer(x_BTD: jax.Array, index: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Means]]:
            y_BTD, means = self.layer(self.layers.at(item.round, index), stream._replace(x_BTD=x_BTD))
            return y_BTD, (x_BTD, means)

        with jax.named_scope(LAYER_LOOP):
            y_BTD, (inputs, means) = jax.lax.scan(layer, x_BTD, jnp.arange(self.group), unroll=self.parts.unroll)
        return y_BTD, inputs, means

    def head(self, params: Params, y_BTD: jax.Array, batch: Any) -> tuple[jax.Array, Any]:
        """`Parts.loss` of this stage's share."""
        return self.parts.loss(params, y_BTD, jax.tree.map(self.stages.share, batch))

    def finished(self, tick: jax.Array) -> Item:
        """What the last stage has computed in this tick; valid if the microbatch has passed all layers."""
        item = self.ticks.forward(tick, self.stages.last)
        return item._replace(valid=item.valid & (item.round == self.ticks.rounds - 1))

    def wire(self) -> jax.Array:
        """Zeros like what a stage sends."""
        x = jax.eval_shape(self.parts.embed, self.tables["embed"], self.one)[0]
        return constrain(jnp.zeros(x.shape, x.dtype), *self.parts.stream_axes)

    @property
    def one(self) -> Any:
        """A microbatch."""
        return jax.tree.map(lambda x: x[0], self.batch)

    def no_losses(self) -> Losses:
        """The results before the first microbatch."""

        def results() -> Any:
            _, results = self.head(self.tables, self.stages.share(self.wire()), self.one)
            return jax.tree.map(self.stages.gather, results)

        def means() -> Means:
            return self.pass_layers(jnp.int32(0), self.wire())[2]

        def zeros(x: Any, *shape: int) -> jax.Array:
            return jnp.zeros((self.ticks.microbatches, *shape, *x.shape), x.dtype)

        by_layer = jax.tree.map(lambda x: zeros(x, self.ticks.rounds), jax.eval_shape(means))
        return Losses(jnp.zeros(self.ticks.microbatches), jax.tree.map(zeros, jax.eval_shape(results)), by_layer)

    def note(self, total: Losses, tick: jax.Array, means: Means) -> Losses:
        """The results with the means of the layers that this stage has computed in a tick."""
        item = self.ticks.forward(tick, self.stages.index)
        place = item.microbatch, item.round

        def note(known: jax.Array, new: jax.Array) -> jax.Array:
            return put(known, jnp.where(item.valid, new, at(known, *place)), *place)

        return total._replace(means=jax.tree.map(note, total.means, means))

    def add(self, total: Losses, item: Item, loss: jax.Array, results: Any) -> Losses:
        """The results with those of one microbatch, from this stage's share."""
        names = (None, "batch", "seq")[: self.stages.place + 2]

        def add(all_MBT: jax.Array, one_Bt: jax.Array) -> jax.Array:
            new = all_MBT.at[item.microbatch].set(self.stages.gather(one_Bt))
            return constrain(new, *names)

        losses_M = total.losses_M.at[item.microbatch].add(loss)
        return total._replace(losses_M=losses_M, results=jax.tree.map(add, total.results, results))

    def losses(self) -> tuple[jax.Array, Any, Means]:
        """The loss of each microbatch, (M,), the results of `Parts.loss`, (M, B, T, ...), and the means of this stage's
        layers, (v, C, M, ...), without a backward pass."""

        def finish(item: Item, y_BTD: jax.Array, total: Losses) -> Losses:
            share = self.stages.share_of_last(y_BTD)
            return self.add(total, item, *self.head(self.tables, share, self.microbatch(item)))

        def step(carry: tuple[jax.Array, Losses], tick: jax.Array) -> tuple[tuple[jax.Array, Losses], None]:
            received, total = carry
            y_BTD, _, means = self.pass_layers(tick, received)
            item, total = self.finished(tick), self.note(total, tick, means)
            # all stages have the same condition, so that collectives may be inside
            total = jax.lax.cond(item.valid, finish, lambda _, __, total: total, item, y_BTD, total)
            return (self.stages.send(y_BTD, 1), total), None

        start = self.wire(), self.no_losses()
        (_, total), _ = jax.lax.scan(step, start, jnp.arange(self.ticks.forward_ticks))
        return self.stages.sum(total.losses_M), total.results, total.by_layer()
