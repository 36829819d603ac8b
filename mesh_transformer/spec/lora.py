"""Low-rank adapters of frozen matrices."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from mesh_transformer.spec.arrays import Array
from mesh_transformer.spec.forms import WHOLE_MATRIX, Form, with_inputs, with_outputs_joined

LORA_A, LORA_B = "lora_a", "lora_b"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapter of the matrix at `path` of a layer, such as `attention/q/w`. `scale` multiplies its product.
    `a_of` is the path of the matrix that has the a, by default `path`: several matrices may share an a."""

    path: str
    rank: int
    scale: float
    a_of: str = ""


@dataclass(frozen=True, kw_only=True)
class Lora(Form):
    """x w + scale * (dropout(x) a) b (Hu et al. 2021, arXiv:2106.09685): a (inputs, rank) is uniform between -+1 /
    sqrt(inputs) at first, as in PEFT; b (rank, outputs) is 0. Only a and b are trained."""

    adapters: tuple[Adapter, ...]

    @functools.cached_property
    def by_path(self) -> dict[str, Adapter]:
        """The adapters by the paths of their matrices."""
        return {adapter.path: adapter for adapter in self.adapters}

    def arrays(self, path: str, array: Array) -> Mapping[str, Array] | None:
        """See `Form`."""
        adapter = self.by_path.get(path)
        if adapter is None:
            return None
        a = with_outputs_joined(array, adapter.rank, None)
        inputs = array.shape[array.dims.index("i")]
        a_arrays = {LORA_A: a._replace(bound=1 / sqrt(inputs), adapter=True)}
        b = with_inputs(array, adapter.rank, None)._replace(adapter=True)
        return {WHOLE_MATRIX: array, **({} if self.shared(path) else a_arrays), LORA_B: b}

    def shared(self, path: str) -> Mapping[str, str]:
        """See `Form`."""
        a_of = self.by_path[path].a_of
        return {LORA_A: a_of} if a_of not in ("", path) else {}
