"""What every optimizer's config has, and what it tells the training step of itself. No jax at import: a driver reads configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Le

from mesh_transformer.fields import Count, Group, NonNegative, Positive, Steps, Unit

if TYPE_CHECKING:
    import optax

Axes = tuple[str | None, ...]
Slot = Callable[[Axes, tuple[int, ...]], Axes]
"""The names of a slot's dimensions, from the names and the sizes of its parameter's."""
MomentsDtype = Literal["float32", "bfloat16"]


class OptimizerConfig(Group):
    """The optimizer, its schedule and the loss."""

    name: str
    """the optimizer: a file in mesh_transformer/optimizers"""
    lr: Positive = 1.2e-4
    """peak learning rate"""
    end_lr: NonNegative = 1.2e-5
    """learning rate after annealing"""
    # numbers of a formula, not counts: the original's files have fractions here
    warmup_steps: Annotated[NonNegative, Unit("steps")] = 3000.0
    """linear warm-up from 0 to lr"""
    anneal_steps: Annotated[Positive, Unit("steps")] = 300000.0
    """cosine decay from lr to end_lr, after the warm-up"""
    total_steps: Steps = 350000
    """length of the whole run"""
    weight_decay: NonNegative = 0.1
    """decoupled decay of matrices (not of biases and norms)"""
    gradient_accumulation_steps: Annotated[Count, Unit("microbatches")] = 1
    """microbatches whose gradients make one step"""
    clip_norm: Positive = 1.0
    """largest global norm of the mean gradient"""
    z_loss: NonNegative = 1e-4
    """weight of the squared log-normaliser in the training loss"""
    z_loss_kind: Literal["classic", "log_z"] = "classic"
    """classic: log-sum-exp after subtracting the maximum, as the original; log_z: the true normaliser"""
    noise_scale_alpha: Annotated[Positive, Le(1)] = 0.01
    """weight of the newest step in the gradient-noise-scale averages"""
    nonfinite: Literal["stop", "skip"] = "stop"
    """a step whose loss or gradient is not finite: stop the run, or skip its update and count it"""

    @property
    def slots(self) -> dict[str, Slot]:
        """What the direction's state holds for each parameter, by its name in that state and in files."""
        raise NotImplementedError

    def direction(self, axes: Any) -> optax.GradientTransformation:
        """The step's direction from a gradient: no clipping by the global norm, decay or learning rate.

        Its state is a NamedTuple of `count`, int32, and the slots. `axes` are the parameters' dimension names.
        """
        raise NotImplementedError


def like_parameter(axes: Axes, shape: tuple[int, ...]) -> Axes:
    """The slot of an average of the whole gradient."""
    return axes


def stored_as(
    dtype: MomentsDtype, direction: optax.GradientTransformation, slots: Any
) -> optax.GradientTransformation:
    """A direction whose slots are kept in `dtype` between steps and are float32 within one."""
    import optax

    if dtype == "float32":
        return direction

    def cast(state: Any, to: str) -> Any:
        return state._replace(**{slot: optax.tree.cast(getattr(state, slot), to) for slot in slots})

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = direction.update(gradients, cast(state, "float32"), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(direction.init(params), dtype), update)
