"""Arrays in memory as a checkpoint source."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mesh_transformer.checkpoint.tensors import Index, TensorInfo, UpdateCounts


class ArraySource:
    """Arrays by name as a TensorSource, in their own dtypes."""

    where = "memory"

    def __init__(
        self, arrays: dict[str, np.ndarray], counts: UpdateCounts, extra: dict[str, Any] | None = None
    ) -> None:
        self.arrays, self.counts, self.extra = arrays, counts, extra or {}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(array.shape, array.dtype) for name, array in self.arrays.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        return self.arrays[name][index]
