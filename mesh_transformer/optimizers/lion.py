"""Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an average of gradients, and one moment instead of Adam's two.

Its updates are larger than Adam's: the paper takes a third to a tenth of the learning rate, and as many times the decay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mesh_transformer.fields import Fraction
from mesh_transformer.optimizers.base import MomentsDtype, OptimizerConfig, Slot, like_parameter, stored_as

if TYPE_CHECKING:
    import optax


class Config(OptimizerConfig):
    """Lion: one average of each parameter's size."""

    name: Literal["lion"] = Field("lion", description=OptimizerConfig.model_fields["name"].description)
    b1: Fraction = Field(0.9, description="weight of the moment in the average whose sign is the update")
    b2: Fraction = Field(0.99, description="decay of the moment")
    moments_dtype: MomentsDtype = Field("float32", description="dtype in which the moment is stored")

    @property
    def slots(self) -> dict[str, Slot]:
        """The moment."""
        return {"mu": like_parameter}

    def direction(self, axes: Any) -> optax.GradientTransformation:
        """A sign for each element."""
        import optax

        return stored_as(self.moments_dtype, optax.scale_by_lion(self.b1, self.b2), self.slots)
