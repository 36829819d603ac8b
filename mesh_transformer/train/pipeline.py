"""The `Schedule` for layers that are split over stages (mesh.pp): 1F1B, and interleaved 1F1B with several rounds.

`parallel.pipeline` says what a stage computes in each tick. A stage keeps the inputs of its layers for the microbatches
between their forward and their backward pass: at most two for each stage, however many microbatches a step has. The
backward pass computes each layer again, as compute.remat full does.

If the layers are not all of one kind, the stages share out the last ones, which are. Every stage computes the ones before
them, the leading layers, in each tick, and the first stage uses the result. That takes no more time than if only the
first stage did: the others would wait for it.

Head and loss (`Parts.loss`) belong to no stage. When the last stage has finished a microbatch, each stage takes an equal
share of its positions through them (of `Parts.shared_out`), and the gradients of the shares are gathered. The embedding
is looked up by all stages, and used by the first.

Shapes: M microbatches, B sequences of one, T positions, D residual width, L layers, v rounds, C layers of a group, s
slots for kept inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from jax.sharding import PartitionSpec as P

from mesh_transformer.models.haiku_model import Stream
from mesh_transformer.models.loops import kinds_of, layers_between, leading_layers
from mesh_transformer.models.model import LAYER_LOOP, Params
from mesh_transformer.models.modules import Means
from mesh_transformer.parallel.pipeline import Item, Stages, Ticks, at, fold, put, unfold
from mesh_transformer.parallel.sharding import active, constrain, constrain_tree, map_axes
from mesh_transformer.train.pipeline_forward import Forward, Layers, Losses
from mesh_transformer.train.schedule import Metrics, Parts, Schedule, microbatches


def schedule(rounds: int) -> Schedule:
    """The schedule with `rounds` groups of layers in each stage; 1: 1F1B."""
    return Schedule(functools.partial(_gradients, rounds), functools.partial(_loss, rounds))


def _stages(parts: Parts) -> Stages:
    partition = active()
    if partition is None:
        raise AssertionError("a pipeline needs a partition")
    place = parts.stream_axes.index(parts.shared_out)
    return Stages(partition, partition.size("layers"), parts.shared_out, place)


def _operands(rounds: int, parts: Parts, params: Params) -> tuple[Params, Any, Layers]:
    """`Forward.tables`, `Forward.leading_own`, and the layers that the stages share out, folded."""
    tables, members, first = {name: params[name] for name in ("embed", "head")}, parts.members, 0
    blocks, own = params["blocks"], parts.own
    if members is None or not (first := leading_layers(members)):
        return tables, None, fold(Layers(blocks, own), rounds)
    leading, leading_own = layers_between(blocks, own, members, 0, first)
    rest = layers_between(blocks, own, members, first, len(kinds_of(members)))
    return {**tables, "leading": leading}, leading_own, fold(Layers(*rest), rounds)


def _stacked(leading: Params, rest: Params) -> Params:
    """The arrays of all layers, from those of the leading layers and those of the rest."""
    both = {
        name: jax.tree.map(lambda *x: jnp.concatenate(x), leading[name], rest[name]) for name in leading if name in rest
    }
    return {**leading, **rest, **both}


def _gradients(
    rounds: int, parts: Parts, trained: Params, frozen: Params, batch: Any
) -> tuple[Params, Metrics, jax.Array]:
    stages, params = _stages(parts), parts.transform(trained, frozen)
    ticks = Ticks(stages.count, rounds, microbatches(batch))

    def run(tables: Params, leading_own: Any, layers: Layers, batch: Any) -> Any:
        return _Backward(Forward(parts, stages, ticks, tables, leading_own, layers, batch)).results()

    run = stages.run(run, (P(), P(), stages.folded, P()), (P(), stages.folded, P(), P(), P(), stages.folded))
    summed, blocks, losses, results, squares, means = run(*_operands(rounds, parts, params), batch)
    blocks = _stacked(summed.pop("leading", {}), unfold(blocks))
    total = parts.constrain({**summed, "blocks": blocks})
    metrics = jax.vmap(parts.metrics)(losses, results, _by_microbatch(means))
    return optax.tree.scale(1 / ticks.microbatches, total), jax.tree.map(lambda x: x.mean(0), metrics), squares


def _by_microbatch(means: Means) -> Means:
    """The means of all layers, from (v, L / v, M, ...) to (M, L, ...)."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), unfold(means))


def _loss(rounds: int, parts: Parts, params: Params, batch: Any) -> tuple[jax.Array, Any, Means]:
    stages = _stages(parts)
    replicas = stages.partition.size("batch")
    # the stages may share out the rows of a microbatch
    shares = stages.count if stages.place == 0 else 1
    count = math.gcd(len(jax.tree.leaves(batch)[0]) // replicas // shares, stages.count)
    # each microbatch has some of the rows of every replica
    cut = functools.partial(rearrange, pattern="(r m b) ... -> m (r b) ...", r=replicas, m=count)
    join = functools.partial(rearrange, pattern="m (r b) ... -> (r m b) ...", r=replicas)
    ticks = Ticks(stages.count, rounds, count)

    def run(tables: Params, leading_own: Any, layers: Layers, batch: Any) -> tuple[jax.Array, Any, Means]:
        return Forward(parts, stages, ticks, tables, leading_own, layers, batch).losses()

    run = stages.run(run, (P(), P(), stages.folded, P()), (P(), P(), stages.folded))
    losses, results, means = run(*_operands(rounds, parts, params), jax.tree.map(cut, batch))
    of_layers = jax.tree.map(lambda x: x.mean(0), _by_microbatch(means))
    return losses.sum(), jax.tree.map(join, results), of_layers


class _Sums(NamedTuple):
    """What the ticks add up, float32: gradients (those of `Forward.tables` of this stage's part only), and by
    microbatch the squared norms."""

    tables: Params
    blocks: Params
    squares_M: jax.Array
    losses: Losses


class _Carry(NamedTuple):
    """What a tick passes on to the next."""

    # x between layers, such as (B, T, D): from the previous stage, and the gradient from the next one
    x_BTD: jax.Array
    dx_BTD: jax.Array
    # (v, s, C, B, T, D): the inputs of layers
    kept: jax.Array
    # (s, B, T, D): see `_Backward._tied_rows`; None if the loss reads no parameters of the embedding
    rows: jax.Array | None
    sums: _Sums


@dataclasses.dataclass(frozen=True, eq=False)
class _Backward:
    """Forward and backward pass on one stage, inside of `Stages.run`."""

    forward: Forward

    def results(self) -> tuple[Params, Params, jax.Array, Any, jax.Array, Means]:
        """Sums of gradients: of embedding and head, and of this stage's layers; losses (M,), results of `Parts.loss`
        (M, B, T, ...), squared norms of the microbatches' gradients (M,), means of this stage's layers (v, C, M,
        ...)."""
        ticks, carry = self.forward.ticks, self._start()
        ends = ticks.warmup, ticks.forward_ticks, ticks.total
        # the first ticks have no backward pass, the last ones no forward pass
        for start, stop, passes in zip((0, *ends), ends, ((True, False), (True, True), (False, True)), strict=False):
            body = functools.partial(self._tick, *passes)
            carry, _ = jax.lax.scan(body, carry, jnp.arange(start, stop))
        sums = carry.sums
        tables, losses, squares = self.forward.stages.sum((sums.tables, sums.losses.losses_M, sums.squares_M))
        return tables, sums.blocks, losses, sums.losses.results, squares, sums.losses.by_layer()

    def _start(self) -> _Carry:
        f = self.forward
        wire = f.wire()
        inputs = jnp.zeros((f.ticks.rounds, f.ticks.slots, f.group, *wire.shape), wire.dtype)
        zeros = functools.partial(jax.tree.map, lambda p: jnp.zeros(p.shape, jnp.float32))
        sums = _Sums(zeros(f.tables), zeros(f.layers.params), jnp.zeros(f.ticks.microbatches), f.no_losses())
        rows = jnp.zeros((f.ticks.slots, *wire.shape)) if f.parts.tied else None
        return _Carry(wire, wire, self._constrain_kept(inputs), rows, sums)

    def _tick(self, forward: bool, backward: bool, carry: _Carry, tick: jax.Array) -> tuple[_Carry, None]:
        stages, y_BTD, dy_BTD = self.forward.stages, carry.x_BTD, carry.dx_BTD
        if forward:
            y_BTD, inputs, means = self.forward.pass_layers(tick, carry.x_BTD)
            losses = self.forward.note(carry.sums.losses, tick, means)
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
        changing = carry.rows, carry.sums

        def skip(y_BTD: jax.Array, changing: Any) -> tuple[jax.Array, Any]:
            return jnp.zeros_like(y_BTD), changing

        if self.forward.ticks.rounds == 1:
            dy_BTD, (rows, sums) = self._head(item, y_BTD, changing)
        else:
            # all stages have the same condition, so that collectives may be inside
            head = functools.partial(self._head, item)
            dy_BTD, (rows, sums) = jax.lax.cond(item.valid, head, skip, y_BTD, changing)
        return dy_BTD, carry._replace(rows=rows, sums=sums)

    def _head(self, item: Item, y_BTD: jax.Array, changing: Any) -> tuple[jax.Array, Any]:
        f, (rows, sums) = self.forward, changing
        batch = f.microbatch(item)
        tables = {name: f.tables[name] for name in ("head", *["embed"][: f.parts.tied])}
        loss = jax.value_and_grad(lambda tables, y: f.head(tables, y, batch), (0, 1), has_aux=True)
        (value, results), (gradient, dy_BTD) = loss(tables, f.stages.share_of_last(y_BTD))
        gradient = self._settled(gradient)
        whole = f.stages.sum(gradient)
        if rows is not None:
            rows = put(rows, self._tied_rows(whole["embed"], batch), item.microbatch % f.ticks.slots)
        # the sum over stages counts it once
        square = jnp.where(f.stages.index == 0, optax.tree.norm(whole, squared=True), 0)
        added = {name: optax.tree.add(sums.tables[name], gradient[name]) for name in gradient}
        sums = _Sums(
            self._settled({**sums.tables, **added}),
            sums.blocks,
            sums.squares_M.at[item.microbatch].add(square),
            f.add(sums.losses, item, value, results),
        )
        return f.stages.gather(dy_BTD), (rows, sums)

    def _pull_layers(self, tick: jax.Array, dy_BTD: jax.Array, carry: _Carry) -> tuple[jax.Array, _Carry]:
        """The backward pass of this stage's layers in a tick, and of the embedding with the leading layers: the gradient
        of the stage's input."""
        f, sums = self.forward, carry.sums
        item, stage = f.ticks.backward(tick, f.stages.index), f.stages.index
        batch, slot = f.microbatch(item), item.microbatch % f.ticks.slots
        last = (stage == f.stages.last) & (item.round == f.ticks.rounds - 1)

        def embed(params: Params) -> tuple[tuple[jax.Array, Any], Stream]:
            stream = f.parts.embed(params, batch)
            return (stream.x_BTD, stream.learned), stream

        _, pull_embed, stream = jax.vjp(embed, f.tables["embed"], has_aux=True)
        start = jnp.where(last, dy_BTD, carry.dx_BTD), jax.tree.map(jnp.zeros_like, stream.learned)
        (dx_BTD, dlearned), blocks, square = self._pull_group(
            item, start, stream, at(carry.kept, item.round, slot), sums.blocks
        )
        first = (stage == 0) & (item.round == 0) & item.valid
        dx_embed, gradients = jnp.where(first, dx_BTD, 0), {}
        if "leading" in f.tables:
            dlearned, (gradient, dx_embed) = self._pull_leading(stream, dx_embed, dlearned)
            gradients["leading"] = _masked(first, gradient)
        (gradient,) = pull_embed((dx_embed, dlearned))
        gradients = self._settled({**gradients, "embed": _masked(item.valid, gradient)})
        square += optax.tree.norm(gradients, squared=True)
        if carry.rows is not None:
            square += 2 * (dx_embed.astype(jnp.float32) * at(carry.rows, slot)).sum()
        tables = {**sums.tables, **{name: optax.tree.add(sums.tables[name], one) for name, one in gradients.items()}}
        squares_M = sums.squares_M.at[item.microbatch].add(square)
        return dx_BTD, carry._replace(sums=_Sums(self._settled(tables), blocks, squares_M, sums.losses))

    def _pull_leading(self, stream: Stream, dy_BTD: jax.Array, dlearned: Any) -> tuple[Any, tuple[Params, jax.Array]]:
        """The leading layers: the gradient of `Stream.learned` with theirs, and those of their parameters and input."""

        def leading(params: Params, x_BTD: jax.Array, learned: Any) -> jax.Array:
            return self.forward.pass_leading(params, stream._replace(x_BTD=x_BTD, learned=learned))

        _, pull = jax.vjp(leading, self.forward.tables["leading"], stream.x_BTD, stream.learned)
        gradient, dx_BTD, dl = pull(dy_BTD)
        return jax.tree.map(jnp.add, dlearned, dl), (gradient, dx_BTD)

    def _pull_group(
        self, item: Item, start: tuple[jax.Array, Any], stream: Stream, inputs: jax.Array, total: Params
    ) -> tuple[tuple[jax.Array, Any], Params, jax.Array]:
        """The layers of a group, the last one first: the gradients of its input and of `Stream.learned`, the sum of
        gradients with theirs, and the squared norm of theirs."""
        f = self.forward
        sums, names = f.parts.sums or f.stages.partition, map_axes(lambda axes: axes[1:], f.axes(f.layers.params))

        def layer(carry: Any, index: jax.Array) -> tuple[Any, None]:
            (dy_BTD, dlearned), total, square = carry
            one = f.layers.at(item.round, index)

            def layer(params: Params, x_BTD: jax.Array, learned: Any) -> tuple[jax.Array, jax.Array]:
                inputs = stream._replace(x_BTD=x_BTD, learned=learned)
                y_BTD, means = f.layer(one._replace(params=params), inputs)
                return y_BTD, f.parts.loss_of_layer(means)

            _, pull = jax.vjp(layer, one.params, inputs[index], stream.learned)
            gradient, dx_BTD, dl = pull((dy_BTD, jnp.ones(())))
            gradient = _masked(item.valid, constrain_tree(gradient, sums, names))
            total = jax.tree.map(
                lambda x, one: put(x, at(x, item.round, index) + one, item.round, index), total, gradient
            )
            dlearned = jax.tree.map(jnp.add, dlearned, dl)
            return ((dx_BTD, dlearned), total, square + optax.tree.norm(gradient, squared=True)), None

        with jax.named_scope(LAYER_LOOP):
            carry, unroll = (start, total, jnp.zeros(())), f.parts.unroll
            (start, total, square), _ = jax.lax.scan(layer, carry, jnp.arange(f.group), reverse=True, unroll=unroll)
        return start, total, square

    def _settled(self, gradient: Params) -> Params:
        """Gradients of tables in float32, split as the tables are: with ZeRO-1 they are split over dp after the
        loop."""
        partition, axes = self.forward.stages.partition, self.forward.parts.axes
        axes = {**axes, "leading": self.forward.axes(gradient.get("leading", {}))}
        gradient = optax.tree.cast(gradient, jnp.float32)
        return {name: constrain_tree(tree, partition, axes[name]) for name, tree in gradient.items()}

    def _tied_rows(self, gradient: Params, batch: Any) -> jax.Array:
        """The embedding of a microbatch by the head's gradient of the table that both share, float32 (B, T, D).

        The squared norm of the gradient of this table includes the product of the two parts. The embedding is linear in
        its parameters: the product is that of these rows with the gradient of the embedding's output.
        """
        parts = self.forward.parts
        return constrain(parts.embed(gradient, batch).x_BTD, *parts.stream_axes)

    def _constrain_kept(self, kept: jax.Array) -> jax.Array:
        return constrain(kept, None, None, None, *self.forward.parts.stream_axes)


def _masked(valid: jax.Array, gradient: Params) -> Params:
    """The gradient in float32; zeros if it is not valid.

    Not by a zero cotangent: the gradient of an idle stage's input may be not a number.
    """
    return jax.tree.map(lambda g: jnp.where(valid, g.astype(jnp.float32), 0), gradient)
