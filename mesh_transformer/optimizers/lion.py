"""Lion (Chen et al. 2023, arXiv:2302.06675): the update is the sign of an average of gradients, with one moment.

Its updates are larger than Adam's. The paper uses a learning rate 3 to 10 times smaller, and a weight decay as many
times larger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mesh_transformer.fields import Fraction
from mesh_transformer.optimizers.base import MomentsDtype, OptimizerConfig, Slot, like_parameter, stored_as
from mesh_transformer.spec import AxesTree

if TYPE_CHECKING:
    import optax


class LionConfig(OptimizerConfig):
    """Lion: one moment for each element of a parameter."""

    name: Literal["lion"] = "lion"
    """the optimizer: a file in mesh_transformer/optimizers"""
    b1: Fraction = 0.9
    """weight of the moment in the average whose sign is the update"""
    b2: Fraction = 0.99
    """decay of the moment"""
    moments_dtype: MomentsDtype = "float32"
    """dtype of the stored moment"""

    @property
    def slots(self) -> dict[str, Slot]:
        """The moment."""
        return {"mu": like_parameter}

    def direction(self, axes: AxesTree) -> optax.GradientTransformation:
        """The sign of the average of moment and gradient."""
        import optax

        return stored_as(self.moments_dtype, optax.scale_by_lion(self.b1, self.b2), self.slots)
