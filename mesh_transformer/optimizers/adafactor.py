"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235): a matrix's second moment is kept as row and column averages.

Decay, epsilon and the clipping of updates are the paper's. There is no first moment, and no relative step size: the learning
rate is absolute, as for the other optimizers (and in Zhai et al. 2021, arXiv:2106.04560).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Lt

from mesh_transformer.fields import Dims, Positive
from mesh_transformer.optimizers.base import Axes, OptimizerConfig, Slot

if TYPE_CHECKING:
    import optax


class Config(OptimizerConfig):
    """Adafactor: of a matrix one average for each row and each column, of other parameters one of their size."""

    name: Literal["adafactor"] = "adafactor"
    """the optimizer: a file in mesh_transformer/optimizers"""
    decay_rate: Annotated[Positive, Lt(1)] = 0.8
    """step t keeps 1 - t ** -decay_rate of the second moment"""
    eps: Positive = 1e-30
    """added to the squared gradient"""
    clipping_threshold: Positive = 1.0
    """largest root mean square of one matrix's or vector's update, before the learning rate"""
    min_dim_size_to_factor: Dims = 128
    """matrices with a smaller side keep a whole second moment"""

    @property
    def slots(self) -> dict[str, Slot]:
        """Row and column averages of factored matrices, whole ones of the rest; a placeholder of size 1 where there is none."""
        return {name: partial(self._axes, name) for name in ("v_row", "v_col", "v")}

    def _axes(self, slot: str, axes: Axes, shape: tuple[int, ...]) -> Axes:
        layers, own = axes[: axes.count("layers")], axes[axes.count("layers") :]
        sizes = shape[len(layers) :]
        # as optax: the row average is over the largest dimension, the column average over the next
        order = sorted(range(len(own)), key=lambda dimension: sizes[dimension])
        factored = len(order) > 1 and sizes[order[-2]] >= self.min_dim_size_to_factor
        if factored != (slot != "v"):
            return (*layers, None)
        if not factored:
            return axes
        dropped = order[-1] if slot == "v_row" else order[-2]
        return (*layers, *own[:dropped], *own[dropped + 1 :])

    def direction(self, axes: Any) -> optax.GradientTransformation:
        """The gradient over the root of the second moment, clipped; each of the stacked layers as if alone."""
        import jax
        import optax
        from optax import FactoredState

        rms = optax.scale_by_factored_rms(
            decay_rate=self.decay_rate, min_dim_size_to_factor=self.min_dim_size_to_factor, epsilon=self.eps
        )
        clip = optax.clip_by_block_rms(self.clipping_threshold)

        def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
            updates, state = rms.update(gradients, state, params)
            return clip.update(updates, optax.EmptyState())[0], state

        stacked = jax.tree.map(
            lambda names: 0 if "layers" in names else None, axes, is_leaf=lambda node: isinstance(node, tuple)
        )
        if not jax.tree.leaves(stacked):
            return optax.GradientTransformation(rms.init, update)
        slots = FactoredState(None, stacked, stacked, stacked)
        return optax.GradientTransformation(
            jax.vmap(rms.init, (stacked,), slots),
            jax.vmap(update, (stacked, slots, stacked), (stacked, slots)),
        )
