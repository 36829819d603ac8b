"""Normalization as plain data."""

import math
from dataclasses import dataclass
from typing import Literal

from mesh_transformer.spec.arrays import Array, Arrays


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A normalization, computed in float32.

    layer: (x - mean) / sqrt(variance + eps). rms: x / sqrt(mean of x^2 + eps) (Zhang and Sennrich 2019,
    arXiv:1910.07467). length: x / (norm of x + eps), with a scale that starts at sqrt(d_model): the classic rmsnorm, or
    scalenorm (Nguyen and Salazar 2019) with `one_scale`. With `plus_one` the scale is 1 + the parameter.
    """

    kind: Literal["layer", "rms", "length"] = "layer"
    eps: float = 1e-5
    offset: bool = True
    one_scale: bool = False
    plus_one: bool = False

    def arrays(self, axis: str | None, width: int) -> Arrays:
        """The scale, and the offset if there is one, of a norm over `width` dims that are called `axis`."""
        offset = Array((), ()) if self.one_scale else Array((axis,), (width,))
        first_scale = math.sqrt(width) if self.kind == "length" else 1.0
        scale = offset._replace(constant=0.0 if self.plus_one else first_scale)
        return {"scale": scale, "offset": offset} if self.offset else {"scale": scale}
