"""An optimizer: gradient descent with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mesh_transformer.fields import Fraction
from mesh_transformer.optimizers.base import OptimizerConfig, Slot, like_parameter

if TYPE_CHECKING:
    import optax


class State(NamedTuple):
    """The number of updates, and the decayed sum of gradients."""

    count: Any
    trace: Any


class Config(OptimizerConfig):
    """Momentum."""

    name: Literal["momentum"] = "momentum"
    """the optimizer"""
    friction: Fraction = 0.9
    """decay of the sum of gradients"""

    @property
    def slots(self) -> dict[str, Slot]:
        """The sum of gradients."""
        return {"trace": like_parameter}

    def direction(self, axes: Any) -> optax.GradientTransformation:
        """The sum of gradients."""
        import jax
        import jax.numpy as jnp
        import optax

        def init(params: Any) -> State:
            return State(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

        def update(gradients: Any, state: State, params: Any = None) -> tuple[Any, State]:
            trace = jax.tree.map(lambda g, t: g + self.friction * t, gradients, state.trace)
            return trace, State(state.count + 1, trace)

        return optax.GradientTransformation(init, update)
