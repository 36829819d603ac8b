"""The training step and the evaluation step, compiled for a partition.

Shapes: A microbatches, B sequences of a microbatch over the whole mesh, T positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mesh_transformer import platforms
from mesh_transformer.config import Config
from mesh_transformer.models.model import Params
from mesh_transformer.models.placement import Placement
from mesh_transformer.models.vocabulary import VocabTiles
from mesh_transformer.ops.loss import TokenLoss, mean_loss
from mesh_transformer.parallel.sharding import constrain_tree, moment_rules, use
from mesh_transformer.train import noise
from mesh_transformer.train.optim import Optimizer, OptState, learning_rate

Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """Everything that a step changes and a checkpoint keeps."""

    step: jax.Array  # int32: updates done, skipped ones included
    params: Params  # float32; what is trained
    opt_state: OptState
    noise: noise.NoiseAverages
    skipped: jax.Array  # int32: updates skipped because something was not finite
    frozen: Params  # what `transform` takes beside the trained parameters; empty in a run of the commands


def all_trained(params: Params) -> tuple[Params, Params]:
    """The trained and the frozen part of a tree like the parameters."""
    return params, {}


def side_by_side(trained: Params, frozen: Params) -> Params:
    """The model's parameters from two parts that have different stages."""
    return {**trained, **frozen}


class TrainProgram:
    """The functions of one run on one mesh, all jitted: `init`, `begin`, `train_step`, `eval_step`.

    In- and out-shardings come from `state_shardings`; the state is donated.
    """

    def __init__(
        self,
        placement: Placement,
        config: Config,
        *,
        split: Callable[[Params], tuple[Params, Params]] = all_trained,
        transform: Callable[[Params, Params], Params] = side_by_side,
    ):
        """Prepare the functions; nothing is compiled.

        Args:
            split: of a tree like the model's parameters, the part that is trained and the frozen one.
            transform: the model's parameters from the two parts, all in the compute dtype. The gradient goes through it
                to the trained part.
        """
        self.placement, self.config = placement, config
        self.split, self.transform = split, transform
        self.model, self.partition = placement.model, placement.partition
        self.moments = self.partition.with_rules(**moment_rules(config.mesh))
        self._tiles = self._vocab_tiles()
        self.axes, self.frozen_axes = split(self.model.axes)
        self.optimizer = Optimizer(config.optimizer, self.axes)
        self.state_shardings = self._state_shardings()
        whole = self.partition.sharding()
        self.batch_sharding = self.partition.sharding(None, "batch", None)
        self.eval_sharding = self.partition.sharding("batch", None)
        self.init = jax.jit(self._init, out_shardings=self.state_shardings)
        self.begin = jax.jit(_begin, out_shardings=self.state_shardings, donate_argnums=(0, 1, 2))
        self.fresh_optimizer = jax.jit(self.optimizer.init, out_shardings=self.state_shardings.opt_state)
        self.train_step = jax.jit(
            self._train_step,
            in_shardings=(self.state_shardings, self.batch_sharding),
            out_shardings=(self.state_shardings, whole),
            donate_argnums=0,
        )
        self.eval_step = jax.jit(
            self._eval_step,
            in_shardings=(placement.shardings, self.eval_sharding),
            out_shardings=whole,
        )

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, as a checkpoint is restored into."""
        shapes = jax.eval_shape(self._init, jax.random.key(0))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            self.state_shardings,
        )

    def _vocab_tiles(self) -> VocabTiles:
        """The vocabulary as the loss goes through it: whole where it is split over devices, which sum over theirs at once."""
        if self.placement.size("vocab") > 1:
            return VocabTiles(self.model, self.partition, 1)
        columns = platforms.vocab_columns(self.partition.mesh.devices.flat[0].platform)
        return VocabTiles.of(self.model, self.partition, columns)

    def _state_shardings(self) -> TrainState:
        whole: Any = self.partition.sharding()
        params, frozen = self.partition.shardings(self.axes), self.partition.shardings(self.frozen_axes)
        abstract = jax.eval_shape(self._init, jax.random.key(0))
        slots = self.moments.shardings(self.optimizer.slot_axes(abstract.params))
        opt_state = dict.fromkeys(abstract.opt_state, whole) | slots
        return TrainState(whole, params, opt_state, noise.NoiseAverages(whole, whole), whole, frozen)

    def _init(self, key: jax.Array) -> TrainState:
        params, frozen = self.split(self.model.init(key))
        return _begin(params, self.optimizer.init(params), frozen)

    def _train_step(self, state: TrainState, tokens_ABT: jax.Array) -> tuple[TrainState, Metrics]:
        """One update from tokens (A, B, T + 1) int32. Metrics are float32 scalars named as they are logged."""
        with use(self.partition):
            gradients, metrics, squares = self._gradients(state.params, state.frozen, tokens_ABT)
        norm = optax.tree.norm(gradients)
        updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # of the sum, which exists anyway: XLA would compute the updates twice
        param_norm = optax.tree.norm(self.model.without_padding(self.transform(params, state.frozen)))
        finite = jnp.isfinite(metrics["train/loss"] + norm + param_norm)
        averages = state.noise
        if len(tokens_ABT) > 1:
            a, b = tokens_ABT.shape[:2]
            alpha = self.config.optimizer.noise_scale_alpha
            averages, scale = noise.update(averages, alpha, b, squares.mean(), a * b, jnp.square(norm))
            metrics.update({f"noise/{name}": value for name, value in scale.items()})
        new = TrainState(state.step + 1, params, opt_state, averages, state.skipped, state.frozen)
        metrics |= {
            "train/grad_norm": norm,
            "train/param_norm": param_norm,
            "train/grad_norm_micro": jnp.sqrt(squares).mean(),
            "train/learning_rate": learning_rate(self.config.optimizer, state.opt_state["schedule"]),
            "finite": finite,
        }
        if self.config.optimizer.nonfinite == "skip":
            new = _keep_if(finite, new, state)
        return new, metrics | {"skipped": new.skipped}

    def _gradients(
        self, params: Params, frozen: Params, tokens_ABT: jax.Array
    ) -> tuple[Params, Metrics, jax.Array]:
        """The mean gradient in float32, the mean metrics, and each microbatch's squared gradient norm (A,)."""
        params, frozen = self._for_compute(params, self.axes), self._for_compute(frozen, self.frozen_axes)
        loss_and_gradient = jax.value_and_grad(
            lambda params, tokens_BT: self._loss(self.transform(params, frozen), tokens_BT), has_aux=True
        )

        def microbatch(total: Params, tokens_BT: jax.Array) -> tuple[Params, tuple[Metrics, jax.Array]]:
            (_, metrics), gradient = loss_and_gradient(params, tokens_BT)
            gradient = constrain_tree(gradient, self.moments, self.axes)
            square = optax.tree.norm(optax.tree.cast(gradient, jnp.float32), squared=True)
            return optax.tree.add(total, gradient), (metrics, square)

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        if len(tokens_ABT) == 1:
            total, (metrics, square) = microbatch(zeros, tokens_ABT[0])
            return total, metrics, square[None]
        total, (metrics, squares) = jax.lax.scan(microbatch, zeros, tokens_ABT)
        return (
            optax.tree.scale(1 / len(tokens_ABT), total),
            jax.tree.map(lambda m: m.mean(0), metrics),
            squares,
        )

    def _for_compute(self, params: Params, axes: Params) -> Params:
        params = self.placement.cast(params, axes)
        return (
            self.placement.gather(params, axes) if self.config.mesh.gather_weights == "per_step" else params
        )

    def _loss(self, params: Params, tokens_BT: jax.Array) -> tuple[jax.Array, Metrics]:
        """Mean loss with the z-loss, which is averaged over a sequence's positions and added to each."""
        loss, per_token = self._mean_loss(params, tokens_BT, self._objective)
        last_loss = per_token.nll[:, -1] + self._z_loss(per_token).mean(-1)
        return loss, {"train/loss": loss, "train/last_loss": last_loss.mean()}

    def _objective(self, per_token: TokenLoss) -> jax.Array:
        return per_token.nll + self._z_loss(per_token)

    def _z_loss(self, per_token: TokenLoss) -> jax.Array:
        optimizer = self.config.optimizer
        log_z = per_token.shifted_log_z if optimizer.z_loss_kind == "classic" else per_token.log_z
        return optimizer.z_loss * jnp.square(log_z)

    def _mean_loss(
        self, params: Params, tokens_BT: jax.Array, objective: Callable[[TokenLoss], jax.Array]
    ) -> tuple[jax.Array, TokenLoss]:
        x_BTD, _, _ = self.model.hidden(params, tokens_BT[:, :-1])
        chunks = self.loss_chunks(*x_BTD.shape[:2])
        head = self.model.gathered_head(params)
        y_BTD = self.model.final_norm(head, x_BTD)
        return mean_loss(self._tiles, objective, chunks, head, y_BTD, tokens_BT[:, 1:])

    def loss_chunks(self, batch: int, positions: int) -> int:
        """Parts in which `positions` go through the head, so that a device holds `compute.logits_mib` of logits."""
        rows = self.partition.sharding("batch", "seq", "vocab").shard_shape(
            (batch, positions, self.model.decoder.padded_vocab)
        )
        needed = math.prod(rows) * 4 / 2**20 / int(self.model.compute.logits_mib)
        return next(
            n for n in range(1, positions + 1) if positions % n == 0 and (n >= needed or n == positions)
        )

    def _eval_step(self, params: Params, tokens_BT: jax.Array) -> Metrics:
        """Mean loss without z-loss, last-token loss and accuracy of tokens (B, T + 1); of all parameters."""
        with use(self.partition):
            params = self.placement.cast(params)
            loss, per_token = self._mean_loss(params, tokens_BT, lambda per_token: per_token.nll)
        return {
            "loss": loss,
            "last_loss": per_token.nll[:, -1].mean(),
            "accuracy": per_token.correct.mean(),
        }


def _begin(params: Params, opt_state: OptState, frozen: Params) -> TrainState:
    """The state at step 0 of a run that begins with these parameters and moments."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, opt_state, noise.NoiseAverages.empty(), zero, frozen)


def _keep_if(finite: jax.Array, new: TrainState, old: TrainState) -> TrainState:
    """`new` where the step was finite; else `old` with the step and the skip counted."""
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    return kept._replace(step=new.step, skipped=old.skipped + (~finite).astype(jnp.int32))


def compile_step(program: TrainProgram, accumulation: int, batch: int) -> jax.stages.Compiled:
    """The train step compiled ahead of time, for its memory, shardings and collectives. Nothing is allocated."""
    tokens = jax.ShapeDtypeStruct((accumulation, batch, program.config.seq + 1), jnp.int32)
    step: Callable[..., Any] = program.train_step
    return step.lower(program.abstract_state, tokens).compile()  # type: ignore[attr-defined]


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Memory that one device needs to run a program: all that is alive at the worst moment, and its code.

    Not arguments + `temp_size_in_bytes`, which is more than libtpu's programs allocate (docs/architecture.md).
    """
    memory: Any = compiled.memory_analysis()
    return memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes
