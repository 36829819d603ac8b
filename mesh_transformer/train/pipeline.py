"""The `Schedule` for layers that are split over stages (mesh.pp): 1F1B, and interleaved 1F1B with several rounds.

`parallel.pipeline` says what a stage computes in each tick. A stage keeps the inputs of its layers for the microbatches
between their forward and their backward pass: at most two for each stage, however many microbatches a step has. The
backward pass computes each layer again, as compute.remat full does.

Final norm, head and loss belong to no stage. When the last stage has finished a microbatch, each stage takes an equal
share of its positions through them, and the gradients of the shares are gathered. The embedding is looked up by all
stages, and used by the first.

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

from mesh_transformer.models.decoder import Context
from mesh_transformer.models.head import TokenLoss
from mesh_transformer.models.model import LAYER_LOOP, Params
from mesh_transformer.ops.attend import context
from mesh_transformer.parallel.pipeline import Item, Stages, Ticks, fold, unfold
from mesh_transformer.parallel.sharding import active, constrain, constrain_tree, gather_weights
from mesh_transformer.train.schedule import Batch, Metrics, Parts, Schedule


def schedule(rounds: int) -> Schedule:
    """The schedule with `rounds` groups of layers in each stage; 1: 1F1B."""
    return Schedule(functools.partial(_gradients, rounds), functools.partial(_loss, rounds))


class _Layers(NamedTuple):
    """What differs between layers, each array folded: (v, L / v, ...); on a stage, (v, C, ...)."""

    params: Params
    # int32
    windows: jax.Array | None

    def at(self, turn: Any, index: Any) -> _Layers:
        """One layer of a round."""
        return jax.tree.map(lambda x: _at(x, turn, index), self)


def _stages() -> Stages:
    partition = active()
    if partition is None:
        raise AssertionError("a pipeline needs a partition")
    return Stages(partition, partition.size("layers"))


def _layers(rounds: int, parts: Parts, params: Params) -> _Layers:
    return fold(_Layers(params["blocks"], parts.model.windows()), rounds)


def _gradients(
    rounds: int, parts: Parts, trained: Params, frozen: Params, batch: Batch
) -> tuple[Params, Metrics, jax.Array]:
    stages, params = _stages(), parts.transform(trained, frozen)
    tables = {"embed": params["embed"], "head": params["head"]}
    ticks = Ticks(stages.count, rounds, len(batch.tokens))

    def run(tables: Params, layers: _Layers, batch: Batch) -> Any:
        return _Backward(_Forward(parts, stages, ticks, tables, layers, batch)).results()

    run = stages.run(run, (P(), stages.folded, P()), (P(), stages.folded, P(), P(), P()))
    summed, blocks, losses, per_token, squares = run(tables, _layers(rounds, parts, params), batch)
    total = parts.constrain({**summed, "blocks": unfold(blocks)})
    metrics = jax.vmap(parts.metrics)(losses, per_token)
    return optax.tree.scale(1 / ticks.microbatches, total), jax.tree.map(jnp.mean, metrics), squares


def _loss(rounds: int, parts: Parts, params: Params, batch: Batch) -> tuple[jax.Array, TokenLoss]:
    stages = _stages()
    replicas = stages.partition.size("batch")
    microbatches = math.gcd(len(batch.tokens) // replicas, stages.count)
    # each microbatch has some of the rows of every replica
    cut = functools.partial(rearrange, pattern="(r m b) t -> m (r b) t", r=replicas, m=microbatches)
    join = functools.partial(rearrange, pattern="m (r b) t -> (r m b) t", r=replicas)
    tables = {"embed": params["embed"], "head": params["head"]}
    ticks = Ticks(stages.count, rounds, microbatches)

    def run(tables: Params, layers: _Layers, batch: Batch) -> tuple[jax.Array, TokenLoss]:
        return _Forward(parts, stages, ticks, tables, layers, batch).losses()

    run = stages.run(run, (P(), stages.folded, P()), (P(), P()))
    losses, per_token = run(tables, _layers(rounds, parts, params), jax.tree.map(cut, batch))
    return losses.sum(), jax.tree.map(join, per_token)


class _Losses(NamedTuple):
    """The results of the head: sums over this stage's shares of the positions, and the losses of all tokens."""

    losses_M: jax.Array
    per_token: TokenLoss


@dataclasses.dataclass(frozen=True, eq=False)
class _Forward:
    """The forward pass on one stage, inside of `Stages.run`."""

    parts: Parts
    stages: Stages
    ticks: Ticks
    # "embed" and "head", all of both
    tables: Params
    layers: _Layers
    # all microbatches
    batch: Batch

    @property
    def group(self) -> int:
        """C."""
        return jax.tree.leaves(self.layers)[0].shape[1]

    def microbatch(self, item: Item) -> Batch:
        """The microbatch of an item."""
        return jax.tree.map(lambda x: x[item.microbatch], self.batch)

    def embed(self, params: Params, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """`Model.embed` of a whole microbatch."""
        return self.parts.model.embed(params, tokens_BT, self.parts.model.positions(tokens_BT.shape[1]))

    def layer(self, layer: _Layers, x_BTD: jax.Array, bias_BHTS: jax.Array | None) -> jax.Array:
        """One layer."""
        model = self.parts.model
        angles = model.rotation(model.positions(x_BTD.shape[1]))
        x_BTD, aux = model.layer(layer.params, x_BTD, Context(context.attention(bias_BHTS), angles, layer.windows))
        if aux:
            raise NotImplementedError(f"layers with the sums {sorted(aux)} cannot be split into stages")
        return x_BTD

    def pass_layers(self, tick: jax.Array, received_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The layers of this stage in a tick: (B, T, D) -> (B, T, D), and the input of each layer, (C, B, T, D)."""
        item = self.ticks.forward(tick, self.stages.index)
        x_BTD, bias = self.embed(self.tables["embed"], self.microbatch(item).tokens)
        x_BTD = jnp.where((self.stages.index == 0) & (item.round == 0), x_BTD, received_BTD)

        def layer(x_BTD: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.layer(self.layers.at(item.round, index), x_BTD, bias), x_BTD

        with jax.named_scope(LAYER_LOOP):
            return jax.lax.scan(layer, x_BTD, jnp.arange(self.group), unroll=self.parts.model.compute.scan_unroll)

    def head(self, params: Params, y_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, TokenLoss]:
        """`Parts.loss` of this stage's share of the positions."""
        return self.parts.loss(params, y_BTD, {}, jax.tree.map(self.stages.share, batch))

    def finished(self, tick: jax.Array) -> Item:
        """What the last stage has computed in this tick; valid if the microbatch has passed all layers."""
        item = self.ticks.forward(tick, self.stages.last)
        return item._replace(valid=item.valid & (item.round == self.ticks.rounds - 1))

    def wire(self) -> jax.Array:
        """Zeros like what a stage sends."""
        x = jax.eval_shape(self.embed, self.tables["embed"], self.batch.tokens[0])[0]
        return constrain(jnp.zeros(x.shape, x.dtype), "batch", "block_seq", "act_embed")

    def no_losses(self) -> _Losses:
        """The results before the first microbatch."""
        zeros = jnp.zeros(self.batch.tokens.shape)
        return _Losses(jnp.zeros(self.ticks.microbatches), TokenLoss(zeros, zeros, zeros, zeros > 0))

    def add(self, total: _Losses, item: Item, loss: jax.Array, per_token: TokenLoss) -> _Losses:
        """The results with those of one microbatch, from this stage's share."""

        def put(all_MBT: jax.Array, one_Bt: jax.Array) -> jax.Array:
            new = all_MBT.at[item.microbatch].set(self.stages.gather(one_Bt))
            return constrain(new, None, "batch", "seq")

        return _Losses(total.losses_M.at[item.microbatch].add(loss), jax.tree.map(put, total.per_token, per_token))

    def losses(self) -> tuple[jax.Array, TokenLoss]:
        """The loss of each microbatch, (M,), and of each token, (M, B, T), without a backward pass."""

        def finish(item: Item, y_BTD: jax.Array, total: _Losses) -> _Losses:
            share = self.stages.share_of_last(y_BTD)
            return self.add(total, item, *self.head(self.tables, share, self.microbatch(item)))

        def step(carry: tuple[jax.Array, _Losses], tick: jax.Array) -> tuple[tuple[jax.Array, _Losses], None]:
            received, total = carry
            y_BTD, _ = self.pass_layers(tick, received)
            item = self.finished(tick)
            # all stages have the same condition, so that collectives may be inside
            total = jax.lax.cond(item.valid, finish, lambda _, __, total: total, item, y_BTD, total)
            return (self.stages.send(y_BTD, 1), total), None

        start = self.wire(), self.no_losses()
        (_, total), _ = jax.lax.scan(step, start, jnp.arange(self.ticks.forward_ticks))
        return self.stages.sum(total.losses_M), total.per_token


class _Sums(NamedTuple):
    """What the ticks add up, float32: gradients (those of embedding and head of this stage's part only), and by
    microbatch the squared norms."""

    tables: Params
    blocks: Params
    squares_M: jax.Array
    losses: _Losses


class _Carry(NamedTuple):
    """What a tick passes on to the next."""

    # (B, T, D): from the previous stage, and the gradient from the next one
    x_BTD: jax.Array
    dx_BTD: jax.Array
    # (v, s, C, B, T, D): the inputs of layers
    kept: jax.Array
    # (s, B, T, D): see `_Backward._tied_rows`; None without a tied table
    rows: jax.Array | None
    sums: _Sums


@dataclasses.dataclass(frozen=True, eq=False)
class _Backward:
    """Forward and backward pass on one stage, inside of `Stages.run`."""

    forward: _Forward

    def results(self) -> tuple[Params, Params, jax.Array, TokenLoss, jax.Array]:
        """Sums of gradients: of embedding and head, and of this stage's layers; losses (M,), losses of tokens
        (M, B, T), squared norms of the microbatches' gradients (M,)."""
        ticks, carry = self.forward.ticks, self._start()
        ends = ticks.warmup, ticks.forward_ticks, ticks.total
        # the first ticks have no backward pass, the last ones no forward pass
        for start, stop, passes in zip((0, *ends), ends, ((True, False), (True, True), (False, True)), strict=False):
            body = functools.partial(self._tick, *passes)
            carry, _ = jax.lax.scan(body, carry, jnp.arange(start, stop))
        sums = carry.sums
        tables, losses, squares = self.forward.stages.sum((sums.tables, sums.losses.losses_M, sums.squares_M))
        return tables, sums.blocks, losses, sums.losses.per_token, squares

    def _start(self) -> _Carry:
        f = self.forward
        wire = f.wire()
        inputs = jnp.zeros((f.ticks.rounds, f.ticks.slots, f.group, *wire.shape), wire.dtype)
        zeros = functools.partial(jax.tree.map, lambda p: jnp.zeros(p.shape, jnp.float32))
        sums = _Sums(zeros(f.tables), zeros(f.layers.params), jnp.zeros(f.ticks.microbatches), f.no_losses())
        rows = jnp.zeros((f.ticks.slots, *wire.shape)) if f.parts.model.decoder.tied else None
        return _Carry(wire, wire, _constrain_kept(inputs), rows, sums)

    def _tick(self, forward: bool, backward: bool, carry: _Carry, tick: jax.Array) -> tuple[_Carry, None]:
        stages, y_BTD, dy_BTD = self.forward.stages, carry.x_BTD, carry.dx_BTD
        if forward:
            y_BTD, inputs = self.forward.pass_layers(tick, carry.x_BTD)
            carry = carry._replace(kept=self._keep(tick, inputs, carry.kept))
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
        at = item.round, item.microbatch % self.forward.ticks.slots
        # an idle stage must not overwrite an input
        return _constrain_kept(_put(kept, jnp.where(item.valid, inputs, _at(kept, *at)), *at))

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
        tables = f.tables if f.parts.model.decoder.tied else {"head": f.tables["head"]}
        loss = jax.value_and_grad(lambda tables, y: f.head(tables, y, batch), (0, 1), has_aux=True)
        (value, per_token), (gradient, dy_BTD) = loss(tables, f.stages.share_of_last(y_BTD))
        gradient = self._settled(gradient)
        whole = f.stages.sum(gradient)
        if rows is not None:
            rows = _put(rows, self._tied_rows(whole["embed"], batch.tokens), item.microbatch % f.ticks.slots)
        # the sum over stages counts it once
        square = jnp.where(f.stages.index == 0, optax.tree.norm(whole, squared=True), 0)
        added = {name: optax.tree.add(sums.tables[name], gradient[name]) for name in gradient}
        sums = _Sums(
            self._settled({**sums.tables, **added}),
            sums.blocks,
            sums.squares_M.at[item.microbatch].add(square),
            f.add(sums.losses, item, value, per_token),
        )
        return f.stages.gather(dy_BTD), (rows, sums)

    def _pull_layers(self, tick: jax.Array, dy_BTD: jax.Array, carry: _Carry) -> tuple[jax.Array, _Carry]:
        """The backward pass of this stage's layers in a tick, and of the embedding: the gradient of their input."""
        f, sums = self.forward, carry.sums
        item, stage = f.ticks.backward(tick, f.stages.index), f.stages.index
        tokens, slot = f.microbatch(item).tokens, item.microbatch % f.ticks.slots
        last = (stage == f.stages.last) & (item.round == f.ticks.rounds - 1)
        (_, bias), pull_embed = jax.vjp(lambda p: f.embed(p, tokens), f.tables["embed"])
        start = jnp.where(last, dy_BTD, carry.dx_BTD), jax.tree.map(jnp.zeros_like, bias)
        (dx_BTD, dbias), blocks, square = self._pull_group(
            item, start, bias, _at(carry.kept, item.round, slot), sums.blocks
        )
        first = (stage == 0) & (item.round == 0) & item.valid
        dx_embed = jnp.where(first, dx_BTD, 0)
        (embed,) = pull_embed((dx_embed, dbias))
        embed = self._settled({"embed": _masked(item.valid, embed)})
        square += optax.tree.norm(embed, squared=True)
        if carry.rows is not None:
            square += 2 * (dx_embed.astype(jnp.float32) * _at(carry.rows, slot)).sum()
        tables = {**sums.tables, "embed": optax.tree.add(sums.tables["embed"], embed["embed"])}
        squares_M = sums.squares_M.at[item.microbatch].add(square)
        return dx_BTD, carry._replace(sums=_Sums(self._settled(tables), blocks, squares_M, sums.losses))

    def _pull_group(
        self, item: Item, start: tuple[jax.Array, Any], bias: jax.Array | None, inputs: jax.Array, total: Params
    ) -> tuple[tuple[jax.Array, Any], Params, jax.Array]:
        """The layers of a group, the last one first: the gradients of its input and of the bias, the sum of gradients
        with theirs, and the squared norm of theirs."""
        f, names = self.forward, self.forward.parts.model.stage_axes["block"]

        def layer(carry: Any, index: jax.Array) -> tuple[Any, None]:
            (dy_BTD, dbias), total, square = carry
            one = f.layers.at(item.round, index)
            _, pull = jax.vjp(lambda p, x, b: f.layer(one._replace(params=p), x, b), one.params, inputs[index], bias)
            gradient, dx_BTD, db = pull(dy_BTD)
            gradient = _masked(item.valid, constrain_tree(gradient, f.parts.sums, names))
            total = jax.tree.map(
                lambda x, one: _put(x, _at(x, item.round, index) + one, item.round, index), total, gradient
            )
            dbias = jax.tree.map(jnp.add, dbias, db)
            return ((dx_BTD, dbias), total, square + optax.tree.norm(gradient, squared=True)), None

        with jax.named_scope(LAYER_LOOP):
            carry = start, total, jnp.zeros(())
            unroll = f.parts.model.compute.scan_unroll
            (start, total, square), _ = jax.lax.scan(layer, carry, jnp.arange(f.group), reverse=True, unroll=unroll)
        return start, total, square

    def _settled(self, gradient: Params) -> Params:
        """Gradients of tables in float32, split as the tables are: with ZeRO-1 they are split over dp after the
        loop."""
        partition, axes = self.forward.stages.partition, self.forward.parts.model.axes
        gradient = optax.tree.cast(gradient, jnp.float32)
        return {name: constrain_tree(tree, partition, axes[name]) for name, tree in gradient.items()}

    def _tied_rows(self, gradient: Params, tokens_BT: jax.Array) -> jax.Array:
        """The embedding of tokens by the head's gradient of the table that both share, float32 (B, T, D).

        The squared norm of the gradient of this table includes the product of the two parts. The embedding is linear in
        its parameters: the product is that of these rows with the gradient of the embedding's output.
        """
        model = self.forward.parts.model
        gradient = gather_weights(gradient, model.stage_axes["embed"])
        rows_BTD, _ = model.stages.embed.apply(gradient, None, tokens_BT, model.positions(tokens_BT.shape[1]))
        return constrain(rows_BTD, "batch", "block_seq", "act_embed")


def _masked(valid: jax.Array, gradient: Params) -> Params:
    """The gradient in float32; zeros if it is not valid.

    Not by a zero cotangent: the gradient of an idle stage's input may be not a number.
    """
    return jax.tree.map(lambda g: jnp.where(valid, g.astype(jnp.float32), 0), gradient)


def _at(x: jax.Array, *indices: Any) -> jax.Array:
    """x[indices], without a gather that the partitioner would have to split."""
    for index in indices:
        x = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
    return x


def _put(x: jax.Array, value: jax.Array, *indices: Any) -> jax.Array:
    """x with `value` at x[indices], in place."""
    start = (*indices, *[0] * value.ndim)
    return jax.lax.dynamic_update_slice(x, value.reshape((1,) * len(indices) + value.shape), start)


def _constrain_kept(kept: jax.Array) -> jax.Array:
    return constrain(kept, None, None, None, "batch", "block_seq", "act_embed")
