"""The forward pass of a stage of a pipeline (train/pipeline.py has the schedule).

Shapes: M microbatches, B sequences of one, T positions, D residual width, L layers of the group that the stages
share out, v rounds, C layers of a virtual stage, N layers of the groups that every stage computes whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesh_transformer.models.stack import (
    LAYER_LOOP,
    Batch,
    Kind,
    LayerGroups,
    Means,
    Outputs,
    Results,
    Rows,
    Stream,
    join,
    over_group,
)
from mesh_transformer.parallel.pipeline import Index, Item, PipelineStages, Ticks, at, put
from mesh_transformer.parallel.sharding import Block, Params, constrain
from mesh_transformer.spec import LayerGroup
from mesh_transformer.train.schedule import ModelFunctions, rematerialized

# the groups that every stage computes whole
WHOLE_GROUPS = ("before", "after")


class Stack(NamedTuple):
    """The layers that the stages share out, each array folded: (v, L / v, ...); on a stage, (v, C, ...)."""

    params: Block
    numbers: Rows

    def layer(self, turn: Index, rows: Block, index: Index) -> tuple[Block, Rows]:
        """The parameters of one layer of a round, given its row in the stack of each module, and its numbers."""
        params = {
            name: jax.tree.map(lambda x, row=row: at(x, turn, row), self.params[name]) for name, row in rows.items()
        }
        return params, jax.tree.map(lambda x: at(x, turn, index), self.numbers)


class Losses(NamedTuple):
    """The results of `ModelFunctions.loss`: sums over this stage's shares, and the results of all shares, (M, B, T,
    ...); the means of this stage's layers, (M, v, C, ...); and by name the means of the groups that every stage
    computes, (M, N, ...), zeros on a stage that does not use the groups' output."""

    losses_M: jax.Array
    results: Results
    means: Means
    whole_means: dict[str, Means]

    def by_layer(self) -> Means:
        """The means as the stages are joined: (v, C, M, ...)."""
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), self.means)


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """The forward pass on one stage, inside of `PipelineStages.run`."""

    parts: ModelFunctions
    stages: PipelineStages
    ticks: Ticks
    # the layers of a virtual stage, and by name the groups before and after the pipelined one
    virtual_stage: LayerGroup[Kind]
    whole_groups: dict[str, LayerGroups]
    # the parameters that every stage has: "embed", "head", and by name the layers of `whole_groups`
    tables: Params
    # by name the rows of `ModelFunctions.numbers` of the layers of `whole_groups`
    whole_numbers: dict[str, Sequence[Rows]]
    stack: Stack
    # all microbatches
    batch: Batch

    def microbatch(self, item: Item) -> Batch:
        """The microbatch of an item."""
        return jax.tree.map(lambda x: x[item.microbatch], self.batch)

    @property
    def rows(self) -> Block:
        """The rows of a virtual stage in the stack of each module."""
        return {name: jnp.arange(jax.tree.leaves(leaves)[0].shape[1]) for name, leaves in self.stack.params.items()}

    def enter(self, item: Item) -> tuple[Stream, Means]:
        """The input of the first stage's layers for a microbatch, and the means of the groups before them."""
        stream = self.parts.embed(self.tables["embed"], self.microbatch(item))
        x_BTD, means = self.pass_whole("before", self.tables["before"], stream)
        return stream._replace(x_BTD=x_BTD), means

    def pass_whole(self, name: str, params: Sequence[Block], stream: Stream) -> tuple[jax.Array, Means]:
        """The groups before or after the pipelined one: (B, T, D) -> (B, T, D), and their means, (N, ...)."""
        layer, outputs, x_BTD = rematerialized(self.parts, stream, ()), [], stream.x_BTD
        with jax.named_scope(LAYER_LOOP):
            for group, block, rows in zip(self.whole_groups[name], params, self.whole_numbers[name], strict=True):
                x_BTD, out = over_group(group, layer, x_BTD, block, rows, unroll=self.parts.unroll)
                outputs.append(out)
        return x_BTD, join(outputs)[1] if outputs else {}

    def pass_layers(self, tick: jax.Array, received_BTD: jax.Array) -> tuple[jax.Array, jax.Array, Means, Means]:
        """The layers of this stage in a tick: (B, T, D) -> (B, T, D), the input of each layer, (C, B, T, D), and its
        means, (C, ...); and the means of the groups before the pipelined one."""
        item = self.ticks.forward(tick, self.stages.index)
        stream, before = self.enter(item)
        x_BTD = jnp.where((self.stages.index == 0) & (item.round == 0), stream.x_BTD, received_BTD)

        def layer(kind: Kind, x_BTD: jax.Array, rows: Block, index: jax.Array) -> tuple[jax.Array, Outputs]:
            params, numbers = self.stack.layer(item.round, rows, index)
            y_BTD, means = self.parts.layer_of(kind)(params, stream._replace(x_BTD=x_BTD), numbers)
            return y_BTD, (x_BTD, means)

        with jax.named_scope(LAYER_LOOP):
            y_BTD, (inputs, means) = over_group(
                self.virtual_stage,
                layer,
                x_BTD,
                self.rows,
                jnp.arange(self.virtual_stage.layers),
                unroll=self.parts.unroll,
            )
        return y_BTD, inputs, means, before

    def leave(self, item: Item, y_BTD: jax.Array) -> tuple[jax.Array, Means]:
        """The groups after the pipelined one, of a finished microbatch: (B, T, D) -> (B, T, D), and their means."""
        if not self.whole_groups["after"]:
            return y_BTD, {}
        stream = self.parts.embed(self.tables["embed"], self.microbatch(item))
        return self.pass_whole("after", self.tables["after"], stream._replace(x_BTD=y_BTD))

    def head(self, params: Params, y_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, Results]:
        """`ModelFunctions.loss` of this stage's share."""
        return self.parts.loss(params, y_BTD, jax.tree.map(self.stages.share, batch))

    def finished(self, tick: jax.Array) -> Item:
        """The work of the last stage in this tick; valid if the microbatch has passed all layers."""
        item = self.ticks.forward(tick, self.stages.last)
        return item._replace(valid=item.valid & (item.round == self.ticks.rounds - 1))

    def wire(self) -> jax.Array:
        """Zeros of the shape and dtype that a stage sends."""
        x = jax.eval_shape(self.parts.embed, self.tables["embed"], self.first_microbatch)[0]
        return constrain(jnp.zeros(x.shape, x.dtype), *self.parts.stream_axes)

    @property
    def first_microbatch(self) -> Batch:
        """A microbatch, for its shapes."""
        return jax.tree.map(lambda x: x[0], self.batch)

    def no_losses(self) -> Losses:
        """The results before the first microbatch."""

        def results() -> Results:
            _, results = self.head(self.tables, self.stages.share(self.wire()), self.first_microbatch)
            return jax.tree.map(self.stages.gather, results)

        def means() -> tuple[Means, Means, Means]:
            _, _, means, before = self.pass_layers(jnp.int32(0), self.wire())
            _, after = self.leave(self.ticks.forward(0, 0), self.wire())
            return means, before, after

        def zeros(x: jax.Array, *shape: int) -> jax.Array:
            return jnp.zeros((self.ticks.microbatches, *shape, *x.shape), x.dtype)

        shapes, *whole_shapes = jax.eval_shape(means)
        by_layer = jax.tree.map(lambda x: zeros(x, self.ticks.rounds), shapes)
        by_name = {
            name: jax.tree.map(zeros, of_groups) for name, of_groups in zip(WHOLE_GROUPS, whole_shapes, strict=True)
        }
        return Losses(
            jnp.zeros(self.ticks.microbatches), jax.tree.map(zeros, jax.eval_shape(results)), by_layer, by_name
        )

    def note(self, total: Losses, tick: jax.Array, means: Means, before: Means) -> Losses:
        """The results with the means of the layers that this stage has computed in a tick."""
        item = self.ticks.forward(tick, self.stages.index)
        first = item.valid & (self.stages.index == 0) & (item.round == 0)
        before = _noted(total.whole_means["before"], before, first, item.microbatch)
        return total._replace(
            means=_noted(total.means, means, item.valid, item.microbatch, item.round),
            whole_means={**total.whole_means, "before": before},
        )

    def note_after(self, total: Losses, item: Item, after: Means) -> Losses:
        """The results with the means of the groups after the pipelined one, of a finished microbatch."""
        valid = item.valid & (self.stages.index == self.stages.last)
        after = _noted(total.whole_means["after"], after, valid, item.microbatch)
        return total._replace(whole_means={**total.whole_means, "after": after})

    def add(self, total: Losses, item: Item, loss: jax.Array, results: Results) -> Losses:
        """The results, with the results of one microbatch added, from this stage's share."""
        names = (None, "batch", "seq")[: self.stages.place + 2]

        def add(all_MBT: jax.Array, one_Bt: jax.Array) -> jax.Array:
            new = all_MBT.at[item.microbatch].set(self.stages.gather(one_Bt))
            return constrain(new, *names)

        losses_M = total.losses_M.at[item.microbatch].add(loss)
        return total._replace(losses_M=losses_M, results=jax.tree.map(add, total.results, results))

    def losses(self) -> tuple[jax.Array, Results, Means, dict[str, Means]]:
        """The loss of each microbatch, (M,), the results of `ModelFunctions.loss`, (M, B, T, ...), the means of this
        stage's layers, (v, C, M, ...), and of the groups that every stage computes, (M, N, ...), without a backward
        pass."""

        def finish(item: Item, y_BTD: jax.Array, total: Losses) -> Losses:
            y_BTD, after = self.leave(item, y_BTD)
            share = self.stages.share_of_last(y_BTD)
            total = self.note_after(total, item, after)
            return self.add(total, item, *self.head(self.tables, share, self.microbatch(item)))

        def step(carry: tuple[jax.Array, Losses], tick: jax.Array) -> tuple[tuple[jax.Array, Losses], None]:
            received, total = carry
            y_BTD, _, means, before = self.pass_layers(tick, received)
            item, total = self.finished(tick), self.note(total, tick, means, before)
            # all stages have the same condition, so that collectives may be inside
            total = jax.lax.cond(item.valid, finish, lambda _, __, total: total, item, y_BTD, total)
            return (self.stages.send(y_BTD, 1), total), None

        start = self.wire(), self.no_losses()
        (_, total), _ = jax.lax.scan(step, start, jnp.arange(self.ticks.forward_ticks))
        losses, whole_means = self.stages.sum((total.losses_M, total.whole_means))
        return losses, total.results, total.by_layer(), whole_means


def _noted(known: Means, new: Means, valid: jax.Array, *place: jax.Array) -> Means:
    """The means, with `new` at the index `place` if `valid`."""
    return jax.tree.map(lambda old, mean: put(old, jnp.where(valid, mean, at(old, *place)), *place), known, new)
