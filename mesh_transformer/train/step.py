"""The training step and the evaluation step of a model on a mesh.

Shapes: A microbatches, B sequences of a microbatch over the whole mesh, T positions.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mesh_transformer import platforms
from mesh_transformer.config import Config
from mesh_transformer.config.mesh import moment_rules
from mesh_transformer.errors import UserError
from mesh_transformer.models.block import KEPT, LayerNumbers, layer_numbers
from mesh_transformer.models.head import Objective, TokenLoss, VocabTiles, weighted_loss
from mesh_transformer.models.modules import noise
from mesh_transformer.models.placement import Placement
from mesh_transformer.models.stack import Kind, Means, Stream
from mesh_transformer.ops.experts import Dispatch
from mesh_transformer.parallel.replicas import Replicas
from mesh_transformer.parallel.sharding import Params, constrain_tree, use
from mesh_transformer.sequences import Sequences
from mesh_transformer.spec import Layer, LayerGroup
from mesh_transformer.train import experts, pipeline
from mesh_transformer.train.batch import (
    Batch,
    Scored,
    as_sequences,
    check_documents,
    evaluation_metrics,
    microbatch_metrics,
    step_metrics,
)
from mesh_transformer.train.noise_scale import NoiseAverages, update_noise
from mesh_transformer.train.optimizer import Optimizer, OptState
from mesh_transformer.train.schedule import Metrics, ModelFunctions, StepSchedule, sequential, side_by_side, summed_once


class TrainState(NamedTuple):
    """The state that a step changes, and what it reads besides the batch."""

    # int32: finished steps, skipped updates included
    step: jax.Array
    # float32: the trained parameters
    params: Params
    opt_state: OptState
    noise: NoiseAverages
    # int32: updates skipped because a loss or norm was not finite
    skipped: jax.Array
    # the frozen parameters, in the compute dtype: the second argument of `transform`
    frozen: Params


def stored(state: TrainState) -> TrainState:
    """The part of a state that a checkpoint holds: all but the frozen parameters."""
    return state._replace(frozen={})


class TrainProgram:
    """The functions of one run on one mesh, all jitted: `init`, `begin`, `train_step`, `eval_step`.

    In- and out-shardings come from `state_shardings`; the state is donated.
    """

    def __init__(
        self,
        placement: Placement,
        config: Config,
        *,
        split: Callable[[Params], tuple[Params, Params]] | None = None,
        transform: Callable[[Params, Params], Params] = side_by_side,
        schedule: StepSchedule | None = None,
        sources: int = 0,
    ):
        """Prepare the functions. Nothing is compiled.

        Args:
            split: a tree like the model's parameters -> its trained and its frozen part, by default
                `Parameters.split`.
            transform: (trained, frozen) -> the model's parameters, all in the compute dtype. The gradient of the
                trained part flows through it.
            schedule: the order in which microbatches and layers are computed, by default the config's schedule.
            sources: the number of sources whose losses a step returns, given `Sequences.sources`.

        Raises:
            UserError: mesh.pp is over 1, and `transform` is given.
        """
        self.placement, self.config = placement, config
        self.model, self.partition = placement.model, placement.partition
        self.split, self.transform, self.sources = split or self.model.split, transform, sources
        self.schedule = schedule or self._schedule()
        self._dispatch = Dispatch(config.experts.exchange, config.experts.capacity_factor)
        self._router_loss = functools.partial(experts.router_loss, config.experts, self.model.decoder.expert_layers)
        # the replicas, along dp, that compute gradients on their own
        self._replicas = Replicas(self.partition).count if config.mesh.sum_gradients == "per_step" else 1
        if self._replicas > 1:
            self.schedule = summed_once(self.schedule)
        self.moments = self.partition.with_rules(**moment_rules(config.mesh))
        self._tiles = self._vocab_tiles()
        self.axes, self.frozen_axes = self.split(self.model.axes)
        self.optimizer = Optimizer(config.optimizer, self.axes)
        shapes = jax.eval_shape(self._fresh, self.model.shapes)
        self.state_shardings = self._state_shardings(shapes)
        # the shapes, dtypes and shardings for restoring a checkpoint
        self.abstract_state = jax.tree.map(lambda x, s: x.update(sharding=s), shapes, self.state_shardings)
        replicated, self.eval_sharding = self.partition.sharding(), self.partition.sharding("batch")
        self.batch_sharding = self.partition.sharding(None, "batch")
        self.init = jax.jit(self._init, out_shardings=self.state_shardings)
        self.begin = jax.jit(self._begin, out_shardings=self.state_shardings, donate_argnums=(0, 1, 2))
        self.fresh_optimizer = jax.jit(self.optimizer.init, out_shardings=self.state_shardings.opt_state)
        options = platforms.compiler_options(self.partition.devices.flatten().tolist())
        self.train_step = jax.jit(
            self._train_step,
            compiler_options=options,
            in_shardings=(self.state_shardings, self.batch_sharding),
            out_shardings=(self.state_shardings, replicated),
            donate_argnums=0,
        )
        self.eval_step = jax.jit(
            self._eval_step,
            compiler_options=options,
            in_shardings=(placement.shardings, self.eval_sharding),
            out_shardings=replicated,
        )

    @functools.cached_property
    def fresh_params(self) -> Callable[[jax.Array], Params]:
        """New trained parameters, from a key, jitted. XLA does not draw those that are frozen."""
        return jax.jit(lambda key: self.split(self.model.init(key))[0], out_shardings=self.state_shardings.params)

    def parameters(self, state: TrainState) -> Params:
        """All parameters of the model: those that are trained in float32, and those that are frozen."""
        return self.transform(state.params, state.frozen)

    @property
    def length(self) -> int:
        """Positions of a sequence of the data, which may be fewer than the model's positions."""
        return self.config.data.seq or self.model.decoder.seq

    @property
    def _drops(self) -> bool:
        """Whether a step has dropout."""
        return self.config.optimizer.dropout > 0 or any(form.dropout for form in self.model.decoder.forms)

    def _schedule(self) -> StepSchedule:
        if self.placement.size("layers") == 1:
            return sequential
        if self.transform is not side_by_side:
            raise UserError("mesh.pp computes the parameters as they are: set mesh.pp=1 to change some")
        return pipeline.schedule(self.config.mesh.rounds_of_layers)

    def _vocab_tiles(self) -> VocabTiles:
        """The tiles of the loss: one tile where devices split the vocabulary, since each then has only a part of it."""
        if self.placement.size("vocab") > 1:
            return VocabTiles(self.model, self.partition, 1)
        columns = platforms.vocab_columns(self.partition.target.platform)
        return VocabTiles.of(self.model, self.partition, columns)

    def _state_shardings(self, shapes: TrainState) -> TrainState:
        replicated: Any = self.partition.sharding()
        params, frozen = self.partition.shardings(self.axes), self.partition.shardings(self.frozen_axes)
        opt_state = self.optimizer.shardings(self.moments, shapes.params)
        return TrainState(replicated, params, opt_state, NoiseAverages(replicated, replicated), replicated, frozen)

    def _init(self, key: jax.Array) -> TrainState:
        return self._fresh(self.model.init(key))

    def _fresh(self, params: Params) -> TrainState:
        """The state at step 0, from the parameters of the model."""
        trained, frozen = self.split(params)
        return self._begin(trained, self.optimizer.init(trained), frozen)

    def _begin(self, params: Params, opt_state: OptState, frozen: Params) -> TrainState:
        """The state at step 0, with these parameters and this optimizer state."""
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, params, opt_state, NoiseAverages.empty(), zero, self.model.cast(frozen))

    def _train_step(self, state: TrainState, sequences: Sequences | jax.Array) -> tuple[TrainState, Metrics]:
        """One update from sequences (A, B, T + 1), or from their tokens alone.

        Metrics are float32 scalars named as they are logged, over the targets that the loss counts; "finite", bool;
        "skipped", int32; and with `sources`, the sums "source_nll" and "source_tokens" (`batch.source_sums`).
        """
        sequences = as_sequences(sequences)
        with use(self.partition):
            gradients, statistics, squares = self._gradients(state, sequences)
        # the statistics are means over the microbatches of all replicas: times their number, the sums of the step
        sums = optax.tree.scale(len(sequences.tokens) * self._replicas, statistics["sums"])
        metrics, means = statistics["scalars"] | step_metrics(sums), statistics["means"]
        norm = optax.tree.norm(gradients)
        updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if means:
            params = experts.updated_bias(params, means, self.config.experts.bias_rate)
            metrics = metrics | experts.metrics(means)
        # Of the new parameters, which exist anyway; otherwise XLA computes the updates twice.
        param_norm = optax.tree.norm(self.model.without_padding(params, self.axes))
        finite = jnp.isfinite(metrics["train/loss"] + norm + param_norm)
        averages = state.noise
        # the noise scale compares gradients of equally many sequences, which must have equal weights
        if squares is not None and len(squares) > 1 and not sequences.weighted:
            big, alpha = math.prod(sequences.tokens.shape[:2]), self.config.optimizer.noise_scale_alpha
            small = big // len(squares)
            averages, scale = update_noise(averages, alpha, small, squares.mean(), big, jnp.square(norm))
            metrics.update({f"noise/{name}": value for name, value in scale.items()})
        new = TrainState(state.step + 1, params, opt_state, averages, state.skipped, state.frozen)
        metrics |= {"train/grad_norm": norm, "train/param_norm": param_norm}
        if squares is not None:
            metrics["train/grad_norm_micro"] = jnp.sqrt(squares).mean()
        rate = self.optimizer.learning_rate(state.opt_state["schedule"])
        metrics |= {"train/learning_rate": rate, "finite": finite}
        if self.config.optimizer.nonfinite == "skip":
            new = _keep_if(finite, new, state)
        return new, metrics | {"skipped": new.skipped}

    def _gradients(self, state: TrainState, sequences: Sequences) -> tuple[Params, Metrics, jax.Array | None]:
        """The results of `StepSchedule.gradients`."""
        check_documents(self.model.decoder, sequences)
        params = self._for_compute(state.params, self.axes)
        frozen = self._for_compute(state.frozen, self.frozen_axes)
        parts, noise_ABT2 = self._parts(self._objective, self._dispatch), None
        if self._drops:
            *microbatch, length = sequences.tokens.shape
            noise_ABT2 = noise(self.config.model.seed, state.step, (*microbatch, length - 1))
        return self.schedule.gradients(parts, params, frozen, Batch.of(sequences, self._replicas, noise_ABT2))

    def _parts(self, objective: Objective, dispatch: Dispatch) -> ModelFunctions:
        """The model's functions and data; `objective` is the loss of a token."""
        compute = self.model.compute
        kinds = {
            kind.layer: Kind(functools.partial(self._layer, dispatch, kind.layer), kind.modules)
            for group in self.model.layer_groups
            for kind in group.period
        }
        return ModelFunctions(
            embed=self._embed,
            layer=next(iter(kinds.values())).layer,
            loss=functools.partial(self._loss, objective),
            axes=self.axes,
            transform=self.transform,
            layer_loss=self._router_loss,
            metrics=self._metrics,
            sums=self.moments,
            layer_groups=tuple(
                LayerGroup(tuple(kinds[kind.layer] for kind in group.period), group.repeats)
                for group in self.model.layer_groups
            ),
            numbers=layer_numbers(self.model.decoder, counted=self._drops),
            kept=KEPT.get(compute.remat),
            unroll=compute.scan_unroll,
            tied=self.model.decoder.tied,
        )

    def _embed(self, params: Params, batch: Batch) -> Stream:
        return self.model.embed(
            params,
            batch.tokens,
            self.model.positions(batch.tokens.shape[1]) if batch.positions is None else batch.positions,
            segments_BT=batch.segments,
            noise_BT2=batch.noise,
            dropout_rate=self.config.optimizer.dropout,
        )

    def _layer(
        self, dispatch: Dispatch, kind: Layer, params: Params, stream: Stream, numbers: LayerNumbers
    ) -> tuple[jax.Array, Means]:
        rate = self.config.optimizer.dropout
        (x_BTD, _), means = self.model.layer(kind, params, stream, numbers, dropout_rate=rate, dispatch=dispatch)
        return x_BTD, means

    def _for_compute(self, params: Params, axes: Params) -> Params:
        """The parameters in the compute dtype; gathered over fsdp here, if not each layer just before its use."""
        params = constrain_tree(self.model.cast(params), self.partition, axes)
        if self.config.mesh.gather_weights == "per_step":
            return constrain_tree(params, self.partition.with_rules(embed=None), axes)
        return params

    def _loss(self, objective: Objective, params: Params, x_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, Scored]:
        """`ModelFunctions.loss`; `objective` is the loss of a token."""
        chunks = self.loss_chunks(*x_BTD.shape[:2])
        head = self.model.gathered_head(params)
        y_BTD = self.model.final_norm(head, x_BTD)
        loss, losses = weighted_loss(self._tiles, objective, chunks, head, y_BTD, batch.targets, batch.weights)
        return loss, Scored.of(losses, batch)

    def _objective(self, per_token: TokenLoss) -> jax.Array:
        return per_token.nll + self._z_loss(per_token)

    def _z_loss(self, per_token: TokenLoss) -> jax.Array:
        optimizer = self.config.optimizer
        log_z = per_token.shifted_log_z if optimizer.z_loss_kind == "classic" else per_token.log_z
        return optimizer.z_loss * jnp.square(log_z)

    def _metrics(self, loss: jax.Array, scored: Scored, means: Means) -> Metrics:
        """The metrics of a microbatch, the sums of `microbatch_metrics`, and the means of its layers."""
        z_loss, order = self._z_loss(scored.losses), self._order(scored)
        scalars, sums = microbatch_metrics(scored, z_loss, order, self.sources)
        return {"scalars": {"train/loss": loss, **scalars}, "sums": sums, "means": means}

    def _order(self, scored: Scored) -> np.ndarray | None:
        return self.partition.sequence_order(scored.losses.nll.shape[1])

    def loss_chunks(self, batch: int, positions: int) -> int:
        """The number of equal parts of a device's positions whose float32 logits take at most `compute.logits_mib`."""
        sizes = {"batch": batch, "seq": positions, "vocab": self.model.decoder.padded_vocab}
        rows = [size // self.partition.size(name) for name, size in sizes.items()]
        needed, positions = math.prod(rows) * 4 / 2**20 / int(self.model.compute.logits_mib), rows[1]
        return next(n for n in range(1, positions + 1) if positions % n == 0 and (n >= needed or n == positions))

    def _eval_step(self, params: Params, sequences: Sequences | jax.Array) -> Metrics:
        """Mean loss without z-loss, loss of the last token, and accuracy, over the learned targets of sequences (B,
        T + 1); "tokens", the number of these targets; of a model with experts, also their load (`experts.load`).
        `params`: all, as `parameters` returns them."""
        sequences = as_sequences(sequences)
        check_documents(self.model.decoder, sequences)
        with use(self.partition):
            params = self.placement.cast(params)
            # no token is dropped
            parts = self._parts(lambda per_token: per_token.nll, Dispatch(self._dispatch.exchange))
            loss, scored, means = self.schedule.loss(parts, params, Batch.of(sequences))
            metrics = {"loss": loss, **evaluation_metrics(scored, self._order(scored))}
        return {**metrics, experts.LOAD: experts.load(means)} if means else metrics


def _keep_if(finite: jax.Array, new: TrainState, old: TrainState) -> TrainState:
    """`new` if the step was finite; else `old` with the step and the skip counted. The optimizer's own count of steps,
    and with it the learning rate, stays too."""
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    return kept._replace(step=new.step, skipped=old.skipped + (~finite).astype(jnp.int32))


def lower_step(program: TrainProgram, accumulation: int, batch: int) -> jax.stages.Lowered:
    """The train step for `accumulation` microbatches of `batch` sequences, not compiled yet. Nothing is allocated.
    The sequences have documents if `data.packing` says so."""
    tokens = jax.ShapeDtypeStruct((accumulation, batch, program.length + 1), jnp.int32)
    documents = tokens if program.config.data.packing == "documents" else None
    return program.train_step.lower(program.abstract_state, Sequences(tokens, documents))


def compile_step(program: TrainProgram, accumulation: int, batch: int) -> jax.stages.Compiled:
    """The train step compiled ahead of time, to inspect its memory, shardings and collectives. Nothing is allocated."""
    return lower_step(program, accumulation, batch).compile()


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes that one device needs to run a program: the peak of its buffers, and its code.

    Arguments + `temp_size_in_bytes` would be more than libtpu's programs allocate (docs/benchmarks.md).
    """
    memory: Any = compiled.memory_analysis()
    return memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes
