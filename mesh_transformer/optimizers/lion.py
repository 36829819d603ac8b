"""Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an average of gradients, and one moment instead of Adam's two.

Its updates are larger than Adam's: the paper takes a third to a tenth of the learning rate, and as many times the decay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from mesh_transformer.fields import Fraction
from mesh_transformer.optimizers.base import MomentsDtype, OptimizerConfig, Slot, like_parameter, stored_as

if TYPE_CHECKING:
    import optax


class Config(OptimizerConfig):
    """Lion: one average of each parameter's size."""

    name: Literal["lion"] = "lion"
    """the optimizer: a file in mesh_transformer/optimizers"""
    b1: Fraction = 0.9
    """weight of the moment in the average whose sign is the update"""
    b2: Fraction = 0.99
    """decay of the moment"""
    moments_dtype: MomentsDtype = "float32"
    """dtype in which the moment is stored"""

    @property
    def slots(self) -> dict[str, Slot]:
        """The moment."""
        return {"mu": like_parameter}

    def direction(self, axes: Any) -> optax.GradientTransformation:
        """A sign for each element."""
        import optax

        return stored_as(self.moments_dtype, optax.scale_by_lion(self.b1, self.b2), self.slots)
