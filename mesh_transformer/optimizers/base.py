"""The base of an optimizer's config: the common fields, and its interface to the training step.

It imports jax only in functions, because a driver without jax reads configs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Literal, Self

from annotated_types import Le
from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from mesh_transformer.errors import UserError, set_options
from mesh_transformer.fields import ConfigGroup, Count, Derived, Fraction, NonNegative, Positive, Steps, Unit
from mesh_transformer.optimizers.schedules import FIELDS, SCHEDULES, Decay, ScheduleFields
from mesh_transformer.spec import Axes, AxesTree

if TYPE_CHECKING:
    import optax

    Updated = tuple[optax.Updates, optax.OptState]
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]

Slot = Callable[[Axes, tuple[int, ...]], Axes]
"""Returns the dimension names of a slot, from the dimension names and the shape of the parameter."""
MomentsDtype = Literal["float32", "bfloat16"]


class OptimizerConfig(ConfigGroup):
    """The optimizer, its schedule and the loss."""

    name: str
    """the optimizer: a file in mesh_transformer/optimizers"""
    lr: Positive = 1.2e-4
    """peak learning rate"""
    schedule: ScheduleName = "cosine"
    """the learning rate after the warm-up: cosine and linear, down to end_lr over anneal_steps; constant, lr; wsd, lr
    and then down to end_lr over the last decay_steps of the run"""
    end_lr: NonNegative = 1.2e-5
    """learning rate at the end of the schedule (not constant)"""
    # not whole numbers: the original's files have fractions here
    warmup_steps: Annotated[NonNegative, Unit("steps")] = 3000.0
    """length of the linear warm-up from 0 to lr"""
    anneal_steps: Annotated[Positive, Unit("steps")] = 300000.0
    """length of the decay from lr to end_lr, after the warm-up (cosine, linear)"""
    decay_steps: Annotated[Positive | None, Unit("steps"), Derived("total_steps / 10")] = None
    """length of the decay from lr to end_lr at the end of the run (wsd)"""
    decay: Decay = "linear"
    """form of that decay: linear, or sqrt, lr - (lr - end_lr) sqrt(share of decay_steps) (wsd)"""
    total_steps: Steps = 350000
    """length of the whole run"""
    weight_decay: NonNegative = 0.1
    """decoupled weight decay of all arrays but biases and norms: also of the embedding, of the tables of positions, of
    routers and of the head"""
    dropout: Fraction = 0.0
    """share of the numbers that are set to 0 in training, of the embedding and of what each branch of a layer adds (its
    attention, its feed-forward, or their sum in a layer with both in parallel); the others are divided by 1 - dropout.
    The zeros depend on model.seed, step, microbatch, sequence, position and layer, and not on the mesh"""
    gradient_accumulation_steps: Annotated[Count, Unit("microbatches")] = 1
    """microbatches per step"""
    clip_norm: Positive = 1.0
    """global norm to which larger gradients are clipped"""
    z_loss: NonNegative = 1e-4
    """weight of the squared log-normalizer (z-loss) in the training loss"""
    z_loss_kind: Literal["classic", "log_z"] = "classic"
    """normalizer of the z-loss: classic, log-sum-exp after the maximum is subtracted, as in the original; log_z, the
    true normalizer"""
    noise_scale_alpha: Annotated[Positive, Le(1)] = 0.01
    """weight of the newest step in the moving averages of the gradient noise scale"""
    nonfinite: Literal["stop", "skip"] = "stop"
    """what to do if the loss of a step, or the norm of its gradient or of the new parameters, is not finite: stop the
    run, or skip the update and count it"""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        unread = FIELDS - SCHEDULES[self.schedule].reads
        if names := sorted(self.model_fields_set & unread):
            readers = [other for other, schedule in SCHEDULES.items() if schedule.reads.issuperset(names)]
            them = "them" if len(names) > 1 else "it"
            raise UserError(
                f"{' and '.join(f'optimizer.{name}' for name in names)} {'are' if len(names) > 1 else 'is'} given, but "
                f"optimizer.schedule {self.schedule} does not read {them}: remove {them} "
                f"({set_options(*(f'optimizer.{name}=null' for name in names))})"
                + (f", or set optimizer.schedule to {' or '.join(readers)}" if readers else "")
            )
        decay_steps = self.rates.decay_steps
        if "decay_steps" not in unread and self.warmup_steps + decay_steps > self.total_steps:
            raise UserError(
                f"optimizer.warmup_steps {self.warmup_steps:g} and optimizer.decay_steps {decay_steps:g} are "
                f"longer than optimizer.total_steps {self.total_steps}: lower one of the two, or raise total_steps"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unread(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out the fields that the schedule does not read: a config that gives them is refused."""
        unread = FIELDS - SCHEDULES[self.schedule].reads
        return {name: value for name, value in serialize(self).items() if name not in unread}

    @property
    def rates(self) -> ScheduleFields:
        """The fields that the schedule reads."""
        decay_steps = self.total_steps / 10 if self.decay_steps is None else self.decay_steps
        rates = self.lr, self.end_lr, self.warmup_steps, self.anneal_steps, self.total_steps, decay_steps
        return ScheduleFields(*rates, self.decay)

    @property
    def slots(self) -> dict[str, Slot]:
        """The arrays of optimizer state for each parameter, by their names in the state and in files."""
        raise NotImplementedError

    def direction(self, axes: AxesTree) -> optax.GradientTransformation:
        """The transformation of a gradient into a direction, without global-norm clipping, weight decay and learning
        rate.

        Its state is a NamedTuple of `count`, int32, and the slots. `axes` are the dimension names of the parameters.
        """
        raise NotImplementedError


def like_parameter(axes: Axes, shape: tuple[int, ...]) -> Axes:
    """A slot with the shape of its parameter."""
    return axes


def stored_as(
    dtype: MomentsDtype, direction: optax.GradientTransformation, slots: Iterable[str]
) -> optax.GradientTransformation:
    """A direction whose slots are stored in `dtype` between steps and are float32 during a step."""
    import optax

    if dtype == "float32":
        return direction

    def cast(state: optax.OptState, to: str) -> optax.OptState:
        return state._replace(**{slot: optax.tree.cast(getattr(state, slot), to) for slot in slots})

    def update(gradients: optax.Updates, state: optax.OptState, params: optax.Params = None) -> Updated:
        updates, state = direction.update(gradients, cast(state, "float32"), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(direction.init(params), dtype), update)
