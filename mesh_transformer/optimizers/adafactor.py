"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) stores the second moment of a matrix as row and column averages.

Decay, epsilon and update clipping follow the paper. There is no first moment and no relative step size: the learning
rate is absolute, as for the other optimizers (and in Zhai et al. 2021, arXiv:2106.04560).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Lt

from mesh_transformer.fields import STACKS, Dims, Positive
from mesh_transformer.optimizers.base import OptimizerConfig, Slot
from mesh_transformer.spec import Axes, AxesTree

if TYPE_CHECKING:
    import optax
    from jax import Array

    from mesh_transformer.optimizers.base import Updated

    Arrays = tuple[Array, ...]


class AdafactorConfig(OptimizerConfig):
    """Adafactor: one average for each row and each column of a matrix, and one for each element of other parameters."""

    name: Literal["adafactor"] = "adafactor"
    """the optimizer: a file in mesh_transformer/optimizers"""
    decay_rate: Annotated[Positive, Lt(1)] = 0.8
    """at step t the decay of the second moment is 1 - t ** -decay_rate"""
    eps: Positive = 1e-30
    """epsilon that is added to the squared gradient"""
    clipping_threshold: Positive = 1.0
    """largest root mean square of the update of each matrix or vector, before the learning rate"""
    min_dim_size_to_factor: Dims = 128
    """a matrix with a smaller side stores a full second moment"""

    @property
    def slots(self) -> dict[str, Slot]:
        """Row and column averages of factored matrices, full averages of other parameters. An unused slot has size
        1."""
        return {name: partial(self._axes, name) for name in ("v_row", "v_col", "v")}

    def _axes(self, slot: str, axes: Axes, shape: tuple[int, ...]) -> Axes:
        layers = _stacks(axes)
        names = axes[len(layers) :]
        sizes = shape[len(layers) :]
        # as in optax, the row average is over the largest dimension and the column average over the second largest
        order = sorted(range(len(names)), key=lambda dimension: sizes[dimension])
        factored = len(order) > 1 and sizes[order[-2]] >= self.min_dim_size_to_factor
        if factored != (slot != "v"):
            return (*layers, None)
        if not factored:
            return axes
        dropped = order[-1] if slot == "v_row" else order[-2]
        return (*layers, *names[:dropped], *names[dropped + 1 :])

    def direction(self, axes: AxesTree) -> optax.GradientTransformation:
        """The gradient divided by the root of the second moment, then clipped. Each layer of a stack is a matrix of its
        own."""
        import jax
        import optax
        from optax import FactoredState

        rms = optax.scale_by_factored_rms(
            decay_rate=self.decay_rate, min_dim_size_to_factor=self.min_dim_size_to_factor, epsilon=self.eps
        )
        clip = optax.clip_by_block_rms(self.clipping_threshold)

        def by_layer(function: Callable[..., Arrays], results: int, *trees: optax.Params) -> tuple[optax.Params, ...]:
            # each array over its own layers: stacks of several kinds of layers differ in length
            def over_layers(array: Array, names: Axes, *others: Array) -> Arrays:
                mapped = function
                for _ in _stacks(names):
                    mapped = jax.vmap(mapped)
                return mapped(array, *others)

            outputs = jax.tree.map(over_layers, trees[0], axes, *trees[1:])
            return jax.tree.transpose(jax.tree.structure(trees[0]), jax.tree.structure((0,) * results), outputs)

        def init(params: optax.Params) -> FactoredState:
            slots = by_layer(lambda param: tuple(rms.init(param)[1:]), 3, params)
            return FactoredState(rms.init({}).count, *slots)

        def update(gradients: optax.Updates, state: FactoredState, params: optax.Params) -> Updated:
            def layer(gradient: Array, v_row: Array, v_col: Array, v: Array, param: Array) -> Arrays:
                direction, new = rms.update(gradient, FactoredState(state.count, v_row, v_col, v), param)
                return clip.update(direction, optax.EmptyState())[0], *new[1:]

            directions, *slots = by_layer(layer, 4, gradients, state.v_row, state.v_col, state.v, params)
            return directions, FactoredState(optax.safe_increment(state.count), *slots)

        return optax.GradientTransformation(init, update)


def _stacks(axes: Axes) -> Axes:
    """The dimensions of an array that are layers. They come first."""
    return tuple(name for name in axes if name in STACKS)
