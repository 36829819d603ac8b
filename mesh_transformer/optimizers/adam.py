"""Adam (Kingma and Ba 2014, arXiv:1412.6980), with decoupled weight decay (Loshchilov and Hutter 2017,
arXiv:1711.05101)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mesh_transformer.fields import Fraction, Positive
from mesh_transformer.optimizers.base import MomentsDtype, OptimizerConfig, Slot, like_parameter, stored_as
from mesh_transformer.spec import AxesTree

if TYPE_CHECKING:
    import optax


class AdamConfig(OptimizerConfig):
    """Adam: two moments for each element of a parameter."""

    name: Literal["adam"] = "adam"
    """the optimizer: a file in mesh_transformer/optimizers"""
    b1: Fraction = 0.9
    """decay of the first moment"""
    b2: Fraction = 0.999
    """decay of the second moment"""
    eps: Positive = 1e-8
    """epsilon that is added to the root of the second moment"""
    moments_dtype: MomentsDtype = "float32"
    """dtype of the stored moments (classic bf16_optimizer: bfloat16)"""

    @property
    def slots(self) -> dict[str, Slot]:
        """The two moments."""
        return {"mu": like_parameter, "nu": like_parameter}

    def direction(self, axes: AxesTree) -> optax.GradientTransformation:
        """The first moment divided by the root of the second."""
        import optax

        return stored_as(self.moments_dtype, optax.scale_by_adam(self.b1, self.b2, self.eps), self.slots)
