"""The `StepSchedule` for layers that are split over stages (mesh.pp): 1F1B, and interleaved 1F1B with several rounds.

`parallel.pipeline` defines the work of a stage in each tick. A stage keeps the inputs of its layers for the
microbatches between their forward and their backward pass: at most two for each stage, however many microbatches a step
has. The backward pass computes each layer again, as compute.remat full does.

The repeats of one group of layers (`spec.pipelined_group`) are split over the virtual stages: the stages, times the
rounds. Every stage computes the groups before and after it whole, in each tick: the first stage uses the result of the
groups before, the last stage the result of the groups after. This takes no more time than on one stage, for which all
other stages would wait.

All stages compute head and loss (`ModelFunctions.loss`) together. When the last stage has finished a microbatch, each
stage takes an equal share of its positions through them (of `ModelFunctions.shared_out`), and the gradients of the
shares are gathered. The embedding is looked up by all stages, and used by the first.

Shapes: M microbatches, B sequences of one, T positions, D residual width, L layers, v rounds, C layers of a virtual
stage, s slots for kept inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from jax.sharding import PartitionSpec as P

from mesh_transformer.models.stack import (
    LAYER_LOOP,
    Batch,
    Kind,
    LayerGroups,
    Means,
    Results,
    Rows,
    Shared,
    Stream,
    by_group,
    joined_groups,
    over_group,
    rows_by_group,
)
from mesh_transformer.parallel.pipeline import Item, PipelineStages, Ticks, at, fold, put, unfold
from mesh_transformer.parallel.sharding import Block, Params, Tree, active, constrain, constrain_tree, map_axes
from mesh_transformer.spec import LayerGroup, pipelined_group
from mesh_transformer.train.pipeline_forward import Forward, Losses, Stack
from mesh_transformer.train.schedule import Metrics, ModelFunctions, StepSchedule, merged, microbatches, picked


def schedule(rounds: int) -> StepSchedule:
    """The schedule with `rounds` virtual stages on each stage; 1: 1F1B."""
    return StepSchedule(functools.partial(_gradients, rounds), functools.partial(_loss, rounds))


def _stages(parts: ModelFunctions) -> PipelineStages:
    partition = active()
    if partition is None:
        raise AssertionError("a pipeline needs a partition")
    place = parts.stream_axes.index(parts.shared_out)
    return PipelineStages(partition, partition.size("layers"), parts.shared_out, place)


class _Operands(NamedTuple):
    """The layer groups and arrays of a model by placement: replicated (embedding, head, the groups before and after the
    pipelined one) and split over the stages (the pipelined group). See `Forward`."""

    # the layers of a virtual stage
    virtual_stage: LayerGroup[Kind]
    whole_groups: dict[str, LayerGroups]
    arrays: tuple[Params, dict[str, Sequence[Rows]], Stack]
    """`Forward.tables`, `Forward.whole_numbers` and `Forward.stack`."""
    axes: Params
    """The dimension names of the trained parameters: of the tables; and as "layer", of one layer of the pipelined
    group."""

    @classmethod
    def of(cls, stages: PipelineStages, rounds: int, parts: ModelFunctions, params: Params) -> _Operands:
        groups, virtual_stages = parts.layout(params["blocks"]), stages.count * rounds
        pipelined = pipelined_group(groups, virtual_stages)
        assert pipelined is not None
        cuts = {"before": slice(pipelined), "after": slice(pipelined + 1, None)}

        def around_pipelined(of_groups: Sequence[Tree]) -> dict[str, Sequence[Tree]]:
            return {name: list(of_groups[cut]) for name, cut in cuts.items()}

        blocks, numbers = by_group(params["blocks"], groups), rows_by_group(parts.numbers, groups)
        axes = by_group(parts.axes.get("blocks", {}), groups)
        layer = map_axes(lambda names: names[1:], axes[pipelined])
        ends = {name: params[name] for name in ("embed", "head")}
        return cls(
            groups[pipelined]._replace(repeats=groups[pipelined].repeats // virtual_stages),
            around_pipelined(groups),
            (
                {**ends, **around_pipelined(blocks)},
                around_pipelined(numbers),
                fold(Stack(blocks[pipelined], numbers[pipelined]), rounds),
            ),
            {**{name: parts.axes.get(name, {}) for name in ends}, **around_pipelined(axes), "layer": layer},
        )


def _gradients(
    rounds: int, parts: ModelFunctions, trained: Params, frozen: Params, batch: Batch
) -> tuple[Params, Metrics, None]:
    stages, params = _stages(parts), parts.transform(trained, frozen)
    ticks, given = Ticks(stages.count, rounds, microbatches(batch)), _Operands.of(stages, rounds, parts, params)

    def run(tables: Params, whole_numbers: dict[str, Sequence[Rows]], stack: Stack, batch: Batch) -> Any:
        forward = Forward(
            parts, stages, ticks, given.virtual_stage, given.whole_groups, tables, whole_numbers, stack, batch
        )
        return _Backward(forward, given.axes).results()

    run = stages.run(run, (P(), P(), stages.folded, P()), (P(), stages.folded, P(), P(), stages.folded, P()))
    summed, blocks, losses, results, means, whole_means = run(*given.arrays, batch)
    blocks = joined_groups([*summed.pop("before"), unfold(blocks), *summed.pop("after")])
    total = parts.constrain(picked({**summed, "blocks": blocks}, parts.axes))
    metrics = jax.vmap(parts.metrics)(losses, results, _by_microbatch(means, whole_means))
    return optax.tree.scale(1 / ticks.microbatches, total), jax.tree.map(lambda x: x.mean(0), metrics), None


def _by_microbatch(means: Means, whole_means: dict[str, Means]) -> Means:
    """The means of all layers, (M, L + N, ...), from the means of the pipelined group, (v, L / v, M, ...), and the
    means of the other groups, (M, N, ...)."""
    pipelined = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), unfold(means))
    parts = whole_means["before"], pipelined, whole_means["after"]
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: jnp.concatenate([part[name] for part in parts if name in part], axis=1) for name in names}


def _loss(rounds: int, parts: ModelFunctions, params: Params, batch: Batch) -> tuple[jax.Array, Results, Means]:
    stages = _stages(parts)
    replicas = stages.partition.size("batch")
    # the stages may share out the rows of a microbatch
    shares = stages.count if stages.place == 0 else 1
    count = math.gcd(len(jax.tree.leaves(batch)[0]) // replicas // shares, stages.count)
    # each microbatch has some of the rows of every replica
    cut = functools.partial(rearrange, pattern="(r m b) ... -> m (r b) ...", r=replicas, m=count)
    join = functools.partial(rearrange, pattern="m (r b) ... -> (r m b) ...", r=replicas)
    ticks = Ticks(stages.count, rounds, count)

    given = _Operands.of(stages, rounds, parts, params)

    def run(tables: Params, whole_numbers: dict[str, Sequence[Rows]], stack: Stack, batch: Batch) -> Any:
        return Forward(
            parts, stages, ticks, given.virtual_stage, given.whole_groups, tables, whole_numbers, stack, batch
        ).losses()

    run = stages.run(run, (P(), P(), stages.folded, P()), (P(), P(), stages.folded, P()))
    losses, results, means, whole_means = run(*given.arrays, jax.tree.map(cut, batch))
    of_layers = jax.tree.map(lambda x: x.mean(0), _by_microbatch(means, whole_means))
    return losses.sum(), jax.tree.map(join, results), of_layers


class _Sums(NamedTuple):
    """Sums over the ticks, float32: gradients of the trained parameters, of `Forward.tables` only for this stage's
    part; and the losses."""

    tables: Params
    blocks: Params
    losses: Losses


class _Carry(NamedTuple):
    """The carry of the loop over ticks."""

    # x between layers, such as (B, T, D): from the previous stage, and the gradient from the next one
    x_BTD: jax.Array
    dx_BTD: jax.Array
    # (v, s, C, B, T, D): the inputs of layers
    kept: jax.Array
    sums: _Sums


_Start = tuple[jax.Array, Shared]
"""The gradients of x and of `Stream.learned`."""
_LayerCarry = tuple[_Start, Block]
"""The carry of the backward pass over layers: also the sum of gradients."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Backward:
    """Forward and backward pass on one stage, inside of `PipelineStages.run`."""

    forward: Forward
    axes: Params
    """`_Operands.axes`."""

    def results(self) -> tuple[Params, Block, jax.Array, Results, Means, dict[str, Means]]:
        """Sums of gradients: of `Forward.tables`, and of this stage's layers; losses (M,), results of
        `ModelFunctions.loss` (M, B, T, ...), means of this stage's layers (v, C, M, ...), and of the groups that every
        stage computes (M, N, ...)."""
        ticks, carry = self.forward.ticks, self._start()
        ends = ticks.warmup, ticks.forward_ticks, ticks.total
        # the first ticks have no backward pass, the last ones no forward pass
        for start, stop, passes in zip((0, *ends), ends, ((True, False), (True, True), (False, True)), strict=False):
            body = functools.partial(self._tick, *passes)
            carry, _ = jax.lax.scan(body, carry, jnp.arange(start, stop))
        sums = carry.sums
        tables, losses, whole_means = self.forward.stages.sum(
            (sums.tables, sums.losses.losses_M, sums.losses.whole_means)
        )
        return tables, sums.blocks, losses, sums.losses.results, sums.losses.by_layer(), whole_means

    def _start(self) -> _Carry:
        f = self.forward
        wire = f.wire()
        inputs = jnp.zeros((f.ticks.rounds, f.ticks.slots, f.virtual_stage.layers, *wire.shape), wire.dtype)
        zeros = functools.partial(jax.tree.map, lambda p: jnp.zeros(p.shape, jnp.float32))
        layers = picked(f.stack.params, self.axes["layer"])
        sums = _Sums(zeros(self._trained(f.tables)), zeros(layers), f.no_losses())
        return _Carry(wire, wire, self._constrain_kept(inputs), sums)

    def _trained(self, tables: Params) -> Params:
        """The trained part of some tables."""
        return picked(tables, {name: self.axes[name] for name in tables})

    def _tick(self, forward: bool, backward: bool, carry: _Carry, tick: jax.Array) -> tuple[_Carry, None]:
        stages, y_BTD, dy_BTD = self.forward.stages, carry.x_BTD, carry.dx_BTD
        if forward:
            y_BTD, inputs, means, before = self.forward.pass_layers(tick, carry.x_BTD)
            losses = self.forward.note(carry.sums.losses, tick, means, before)
            carry = carry._replace(kept=self._keep(tick, inputs, carry.kept), sums=carry.sums._replace(losses=losses))
        if forward and backward:
            dy_BTD, carry = self._finish(tick, y_BTD, carry)
        if backward:
            dx_BTD, carry = self._pull_layers(tick, dy_BTD, carry)
            carry = carry._replace(dx_BTD=stages.send(dx_BTD, -1))
        if forward:
            carry = carry._replace(x_BTD=stages.send(y_BTD, 1))
        return carry, None

    def _keep(self, tick: jax.Array, inputs: jax.Array, kept: jax.Array) -> jax.Array:
        item = self.forward.ticks.forward(tick, self.forward.stages.index)
        place = item.round, item.microbatch % self.forward.ticks.slots
        # an idle stage must not overwrite an input
        return self._constrain_kept(put(kept, jnp.where(item.valid, inputs, at(kept, *place)), *place))

    def _finish(self, tick: jax.Array, y_BTD: jax.Array, carry: _Carry) -> tuple[jax.Array, _Carry]:
        """The gradient of what the last stage has computed, and the carry with the head's results."""
        item = self.forward.finished(tick)

        def skip(y_BTD: jax.Array, sums: _Sums) -> tuple[jax.Array, _Sums]:
            return jnp.zeros_like(y_BTD), sums

        if self.forward.ticks.rounds == 1:
            dy_BTD, sums = self._head(item, y_BTD, carry.sums)
        else:
            # all stages have the same condition, so that collectives may be inside
            head = functools.partial(self._head, item)
            dy_BTD, sums = jax.lax.cond(item.valid, head, skip, y_BTD, carry.sums)
        return dy_BTD, carry._replace(sums=sums)

    def _head(self, item: Item, y_BTD: jax.Array, sums: _Sums) -> tuple[jax.Array, _Sums]:
        f = self.forward
        batch = f.microbatch(item)
        y_BTD, after, pull_after = self._leave(item, y_BTD)
        tables = {name: f.tables[name] for name in ("head", *["embed"][: f.parts.tied])}
        loss = jax.value_and_grad(lambda trained, y: f.head(merged(tables, trained), y, batch), (0, 1), has_aux=True)
        (value, results), (gradient, dy_BTD) = loss(self._trained(tables), f.stages.share_of_last(y_BTD))
        dy_BTD, of_after = pull_after(f.stages.gather(dy_BTD))
        total = _added(_added(sums.tables, self._settled(gradient)), self._settled(of_after))
        losses = f.note_after(f.add(sums.losses, item, value, results), item, after)
        return dy_BTD, _Sums(self._settled(total), sums.blocks, losses)

    def _leave(
        self, item: Item, y_BTD: jax.Array
    ) -> tuple[jax.Array, Means, Callable[[jax.Array], tuple[jax.Array, Params]]]:
        """`Forward.leave`; and the gradient of y and of the tables, from the gradient of the result."""
        f, batch = self.forward, self.forward.microbatch(item)
        if not f.whole_groups["after"]:
            return y_BTD, {}, lambda dy_BTD: (dy_BTD, {})
        table, layers = f.tables["embed"], f.tables["after"]
        learned, pull_learned = jax.vjp(
            lambda trained: f.parts.embed(merged(table, trained), batch).learned, picked(table, self.axes["embed"])
        )
        stream = f.parts.embed(f.tables["embed"], batch)

        def leave(
            trained: Sequence[Block], y_BTD: jax.Array, learned: Shared
        ) -> tuple[tuple[jax.Array, jax.Array], Means]:
            params = merged(layers, trained)
            y_BTD, means = f.pass_whole("after", params, stream._replace(x_BTD=y_BTD, learned=learned))
            return (y_BTD, f.parts.loss_of_layers(means)), means

        (y_BTD, _), pull, means = jax.vjp(leave, picked(layers, self.axes["after"]), y_BTD, learned, has_aux=True)
        used = item.valid & (f.stages.index == f.stages.last)

        def gradient(dy_BTD: jax.Array) -> tuple[jax.Array, Params]:
            params, dy_BTD, dlearned = pull((dy_BTD, jnp.ones(())))
            tables = {"after": params}
            if learned is not None:
                (tables["embed"],) = pull_learned(dlearned)
            return dy_BTD, _masked(used, tables)

        return y_BTD, means, gradient

    def _pull_layers(self, tick: jax.Array, dy_BTD: jax.Array, carry: _Carry) -> tuple[jax.Array, _Carry]:
        """The backward pass of this stage's layers in a tick, and of the embedding with the groups before: the gradient
        of the stage's input."""
        f, sums = self.forward, carry.sums
        item, stage = f.ticks.backward(tick, f.stages.index), f.stages.index
        batch, slot = f.microbatch(item), item.microbatch % f.ticks.slots
        last = (stage == f.stages.last) & (item.round == f.ticks.rounds - 1)

        def embed(trained: Params) -> tuple[_Start, Stream]:
            stream = f.parts.embed(merged(f.tables["embed"], trained), batch)
            return (stream.x_BTD, stream.learned), stream

        _, pull_embed, stream = jax.vjp(embed, picked(f.tables["embed"], self.axes["embed"]), has_aux=True)
        start = jnp.where(last, dy_BTD, carry.dx_BTD), jax.tree.map(jnp.zeros_like, stream.learned)
        inputs = at(carry.kept, item.round, slot)
        (dx_BTD, dlearned), blocks = self._pull_virtual_stage(item, start, stream, inputs, sums.blocks)
        first = (stage == 0) & (item.round == 0) & item.valid
        dx_embed, gradients = jnp.where(first, dx_BTD, 0), {}
        if f.whole_groups["before"]:
            dlearned, (gradient, dx_embed) = self._pull_before(first, stream, dx_embed, dlearned)
            gradients["before"] = _masked(first, gradient)
        (gradient,) = pull_embed((dx_embed, dlearned))
        gradients = self._settled({**gradients, "embed": _masked(item.valid, gradient)})
        tables = self._settled(_added(sums.tables, gradients))
        return dx_BTD, carry._replace(sums=_Sums(tables, blocks, sums.losses))

    def _pull_before(
        self, first: jax.Array, stream: Stream, dy_BTD: jax.Array, dlearned: Shared
    ) -> tuple[Shared, tuple[Params, jax.Array]]:
        """The backward pass of the groups before the pipelined one: the gradient of `Stream.learned` with their part,
        and the gradients of their parameters and input. Their loss counts only where `first` is true."""

        layers = self.forward.tables["before"]

        def before(trained: Sequence[Block], x_BTD: jax.Array, learned: Shared) -> tuple[jax.Array, jax.Array]:
            params = merged(layers, trained)
            x_BTD, means = self.forward.pass_whole("before", params, stream._replace(x_BTD=x_BTD, learned=learned))
            return x_BTD, self.forward.parts.loss_of_layers(means)

        _, pull = jax.vjp(before, picked(layers, self.axes["before"]), stream.x_BTD, stream.learned)
        gradient, dx_BTD, dl = pull((dy_BTD, first.astype(jnp.float32)))
        return jax.tree.map(jnp.add, dlearned, dl), (gradient, dx_BTD)

    def _pull_virtual_stage(
        self, item: Item, start: _Start, stream: Stream, inputs: jax.Array, total: Block
    ) -> _LayerCarry:
        """The layers of a virtual stage, the last one first: the gradients of its input and of `Stream.learned`, and
        the sum of gradients with theirs."""
        f = self.forward
        sums = f.parts.sums or f.stages.partition

        def layer(
            kind: Kind, carry: _LayerCarry, rows: Block, index: jax.Array
        ) -> tuple[_LayerCarry, tuple[None, Means]]:
            (dy_BTD, dlearned), total = carry
            params, numbers = f.stack.layer(item.round, rows, index)

            axes = {name: self.axes["layer"][name] for name in params if name in self.axes["layer"]}

            def layer(trained: Block, x_BTD: jax.Array, learned: Shared) -> tuple[jax.Array, jax.Array]:
                before = stream._replace(x_BTD=x_BTD, learned=learned)
                y_BTD, means = f.parts.layer_of(kind)(merged(params, trained), before, numbers)
                return y_BTD, f.parts.loss_of_layer(means)

            _, pull = jax.vjp(layer, picked(params, axes), inputs[index], stream.learned)
            gradient, dx_BTD, dl = pull((dy_BTD, jnp.ones(())))
            gradient = constrain_tree(gradient, sums, axes)
            gradient = _masked(item.valid, gradient)
            new = {
                name: jax.tree.map(
                    lambda x, addend, row=row: put(x, at(x, item.round, row) + addend, item.round, row),
                    total[name],
                    gradient[name],
                )
                for name, row in rows.items()
                if name in gradient
            }
            dlearned = jax.tree.map(jnp.add, dlearned, dl)
            return ((dx_BTD, dlearned), {**total, **new}), (None, {})

        with jax.named_scope(LAYER_LOOP):
            layers = jnp.arange(f.virtual_stage.layers)
            result, _ = over_group(
                f.virtual_stage, layer, (start, total), f.rows, layers, unroll=f.parts.unroll, reverse=True
            )
        return result

    def _settled(self, gradient: Params) -> Params:
        """Gradients of tables in float32, split as the tables are: with ZeRO-1 they are split over dp after the
        loop."""
        partition = self.forward.stages.partition
        gradient = optax.tree.cast(gradient, jnp.float32)
        return {name: constrain_tree(tree, partition, self.axes[name]) for name, tree in gradient.items()}

    def _constrain_kept(self, kept: jax.Array) -> jax.Array:
        return constrain(kept, None, None, None, *self.forward.parts.stream_axes)


def _added(total: Params, gradients: Params) -> Params:
    """The sums with further gradients of some tables."""
    return {**total, **{name: optax.tree.add(total[name], gradient) for name, gradient in gradients.items()}}


def _masked(valid: jax.Array, gradient: Params) -> Params:
    """The gradient in float32; zeros if it is not valid.

    A zero cotangent would not do: the gradient of an idle stage's input may be NaN.
    """
    return jax.tree.map(lambda g: jnp.where(valid, g.astype(jnp.float32), 0), gradient)
