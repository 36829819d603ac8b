"""The forward pass over packed parameters: the layers one after the other, each with its own cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from mesh_transformer.infer.cpu.packed import PackedLayer
from mesh_transformer.models.block import LayerNumbers, layer_numbers
from mesh_transformer.models.model import Carries, Carry, Model, Views
from mesh_transformer.models.placement import Placement
from mesh_transformer.models.stack import Stream
from mesh_transformer.parallel.sharding import Params
from mesh_transformer.spec import Layer


@dataclasses.dataclass(frozen=True, eq=False)
class PackedModel(Model):
    """A `Model` whose parameters are the result of `packed.pack`."""

    shares_caches: ClassVar[bool] = False

    def loop(
        self,
        params: Any,
        stream: Stream,
        views: Views,
        view_of: Sequence[int],
        query_index_B: jax.Array | None,
    ) -> Carries:
        """See `Model`. With `query_index_B`, the last layer computes only that position of each sequence."""

        def layer(
            kind: Layer, carry: Carry, packed: PackedLayer, numbers: LayerNumbers, query_index_B: jax.Array | None
        ) -> Carry:
            x_BTD, view = carry
            before = stream._replace(x_BTD=x_BTD)
            # a view of one layer, whose index is 0
            return self.layer(kind, packed.unpack(), before, numbers, view=view, query_index_B=query_index_B)[0]

        # layers of one kind whose arrays have the same shapes are traced once
        jitted = {kind: jax.jit(functools.partial(layer, kind)) for kind in self.decoder.kinds}
        x_BTD, views, numbers = stream.x_BTD, list(views), layer_numbers(self.decoder)
        kinds = (kind for group in self.decoder.layer_groups for kind in group.kinds)
        for number, (kind, packed) in enumerate(zip(kinds, params, strict=True)):
            at, row = view_of[number], jax.tree.map(lambda x, number=number: x[number], numbers)
            query = query_index_B if number == len(params) - 1 else None
            x_BTD, views[at] = jitted[kind]((x_BTD, views[at]), packed, row, query)
        return x_BTD, views


def placed(placement: Placement, params: Params) -> Placement:
    """`placement`; with a `PackedModel` if "blocks" is a tuple, as `packed.pack` makes it."""
    if not isinstance(params["blocks"], tuple):
        return placement
    fields = {field.name: getattr(placement.model, field.name) for field in dataclasses.fields(Model)}
    return dataclasses.replace(placement, model=PackedModel(**fields))
