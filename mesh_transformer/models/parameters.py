"""The parameters of a model: initial values, names of dimensions, dtypes and padding, as `spec.Decoder.arrays` says.

The parameters of a module are stacked by group of layers (`spec.Decoder.layer_groups`). A GPT-J of 28 layers is one
group:

    {"embed": {"tokens": {"w": (50400, 4096)}},
     "blocks": {"norm": {"scale": (28, 4096), ...}, "attention/q": {"w": (28, 4096, 4096)}, ...},
     "head": {"norm": {...}, "logits": {"w": (4096, 50400), "b": (50400,)}}}

With several groups, the names of the modules in "blocks" begin with the number of the group.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.config import ComputeConfig
from mesh_transformer.models.feed_forward import is_router
from mesh_transformer.models.stack import Kind, joined_groups, rows_by_group
from mesh_transformer.parallel.sharding import Axes, Block, Params
from mesh_transformer.spec import Arrays, Decoder, Layer, LayerGroup, in_group


@dataclasses.dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters of a model as trees.

    No field of `compute` is "auto": `mesh_transformer.platforms` has resolved them. `virtual_stages` is mesh.pp x
    mesh.rounds_of_layers: one group of layers is split over them (`Decoder.pipelined_group`). It is 1 without a
    pipeline.
    """

    decoder: Decoder
    compute: ComputeConfig
    virtual_stages: int = 1

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the arithmetic and of the cache."""
        return jnp.dtype(self.compute.dtype)

    def init(self, key: jax.Array) -> Params:
        """Float32 parameters. The values depend only on the key, not on the mesh."""
        embed_key, block_key, head_key = jax.random.split(key, 3)
        groups, keys = self.decoder.layer_groups, jax.random.split(block_key, len(self.decoder.layers))
        blocks = [
            self._init_group(group, rows) for group, rows in zip(groups, rows_by_group(keys, groups), strict=True)
        ]
        return {
            "embed": _drawn(self.decoder.embedding_arrays, embed_key),
            "blocks": joined_groups(blocks),
            "head": _drawn(self.decoder.head_arrays, head_key),
        }

    def _init_group(self, group: LayerGroup[Layer], keys: jax.Array) -> Block:
        stacks: dict[str, list[tuple[list[int], Params]]] = {}
        for kind in dict.fromkeys(group.period):
            layers = [number for number, other in enumerate(group.kinds) if other is kind]
            init = jax.vmap(functools.partial(_drawn, self.decoder.layer_arrays(kind)))
            stacked: Block = init(keys if len(layers) == group.layers else keys[np.array(layers)])
            for module, leaves in stacked.items():
                stacks.setdefault(module, []).append((layers, leaves))
        return {module: _in_order(of_kinds) for module, of_kinds in stacks.items()}

    @functools.cached_property
    def axes(self) -> Params:
        """The dimension names of each parameter: a tree like the parameters' with tuples of names as leaves."""
        arrays = self.decoder.arrays(self.virtual_stages)
        return _by_stage({path: array.axes for path, array in arrays.items()})

    @property
    def shapes(self) -> Params:
        """The result of `init`, as `jax.ShapeDtypeStruct`."""
        arrays = self.decoder.arrays()
        return _by_stage({path: jax.ShapeDtypeStruct(array.shape, jnp.float32) for path, array in arrays.items()})

    @functools.cached_property
    def stage_axes(self) -> Params:
        """The dimension names of each stage's parameters: one layer of each kind; with a tied table for the head."""
        embed, head = _axes(self.decoder.embedding_arrays), _axes(self.decoder.head_arrays)
        return {
            "embed": embed,
            "blocks": {kind: _axes(self.decoder.layer_arrays(kind)) for kind in self.decoder.kinds},
            "head": {**head, "tokens": {"w": embed["tokens"]["w"]}} if self.decoder.tied else head,
        }

    @functools.cached_property
    def layer_groups(self) -> tuple[LayerGroup[Kind], ...]:
        """The layers by their kinds. `Kind.layer` is the specification of a layer."""
        kinds = {kind: Kind(kind, tuple(modules)) for kind, modules in self.stage_axes["blocks"].items()}
        return tuple(
            LayerGroup(tuple(kinds[kind] for kind in group.period), group.repeats)
            for group in self.decoder.layer_groups
        )

    @property
    def rows_by_layer(self) -> list[dict[str, tuple[str, int]]]:
        """For each layer, by module: the name of its stack in "blocks", and the row of the layer."""
        layers: list[dict[str, tuple[str, int]]] = []
        for number, group in enumerate(self.layer_groups):
            used: dict[str, int] = {}
            for kind in group.kinds:
                layer = {}
                for module in kind.modules or ():
                    layer[module] = in_group(module, number, len(self.layer_groups)), used.get(module, 0)
                    used[module] = used.get(module, 0) + 1
                layers.append(layer)
        return layers

    def cast(self, params: Params) -> Params:
        """The parameters in the compute dtype. A step casts once, while they are sharded."""
        return jax.tree.map(lambda p, dtype: p.astype(dtype), params, self.dtypes(params, self.dtype))

    def dtypes(self, params: Params, dtype: jnp.dtype) -> Params:
        """The dtype of each parameter for arithmetic in `dtype`: float32 for a router."""

        def dtype_of(path: jax.tree_util.KeyPath, _: jax.Array) -> jnp.dtype:
            modules = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            return jnp.dtype(jnp.float32) if any(map(is_router, modules)) else dtype

        return jax.tree_util.tree_map_with_path(dtype_of, params)

    def split(self, tree: Params) -> tuple[Params, Params]:
        """The trained and the frozen part of a tree like the parameters: the adapters and all others, or everything and
        nothing if there are no adapters."""
        if not self.decoder.adapted:
            return tree, {}
        arrays = self.decoder.arrays()
        leaves = {path: functools.reduce(operator.getitem, _place(path), tree) for path in arrays}
        trained, frozen = (
            {path: leaf for path, leaf in leaves.items() if arrays[path].adapter is is_trained}
            for is_trained in (True, False)
        )
        return _by_stage(trained), _by_stage(frozen)

    def without_padding(self, params: Params, axes: Params) -> Params:
        """The parameters that the parameter norm counts: untrained numbers (the vocabulary's padding, the biases of
        routers) are zero.

        Args:
            axes: the names of the dimensions of these parameters, which may be some of the model's.
        """

        def zero_padding(x: jax.Array, axes: Axes) -> jax.Array:
            return mask_padding(self.decoder, x, axes.index("vocab"), 0) if "vocab" in axes else x

        counted: Params = jax.tree.map(zero_padding, params, axes)
        blocks = {
            module: {**leaves, "bias": jnp.zeros_like(leaves["bias"])}
            if is_router(module) and "bias" in leaves
            else leaves
            for module, leaves in counted.get("blocks", {}).items()
        }
        return {**counted, "blocks": blocks} if blocks else counted


def mask_padding(decoder: Decoder, x: jax.Array, dimension: int, value: float) -> jax.Array:
    """x with `value` in the vocabulary's padding; `dimension` is the vocabulary."""
    if decoder.padded_vocab == decoder.n_vocab:
        return x
    rows = jax.lax.broadcasted_iota(jnp.int32, x.shape, dimension)
    return jnp.where(rows < decoder.n_vocab, x, value)


def _drawn(arrays: Arrays, key: jax.Array) -> Params:
    """Fresh values, float32. Each array that is not constant has the next key."""
    drawn = {}
    for path, array in arrays.items():
        if array.stddev is None and array.bound is None:
            drawn[path] = jnp.full(array.shape, array.constant, jnp.float32)
            continue
        key, array_key = jax.random.split(key)
        if array.bound is not None:
            drawn[path] = jax.random.uniform(array_key, array.shape, jnp.float32, -array.bound, array.bound)
        elif array.stddev is not None:
            drawn[path] = array.stddev * jax.random.truncated_normal(array_key, -2, 2, array.shape, jnp.float32)
    return _by_module(drawn)


def _axes(arrays: Arrays) -> Params:
    return _by_module({path: array.axes for path, array in arrays.items()})


def _by_stage(values: Mapping[str, object]) -> Params:
    """Values by path as a tree: by stage, module and name."""
    stages: dict[str, dict[str, object]] = {}
    for path, value in values.items():
        stage, _, inner = path.partition("/")
        stages.setdefault(stage, {})[inner] = value
    return {stage: _by_module(inner) for stage, inner in stages.items()}


def _place(path: str) -> tuple[str, str, str]:
    """The stage, module and name of a parameter."""
    stage, _, inner = path.partition("/")
    module, _, name = inner.rpartition("/")
    return stage, module, name


def _by_module(values: Mapping[str, object]) -> Params:
    """Values by path as a tree: by module and name."""
    tree: Params = {}
    for path, value in values.items():
        module, _, name = path.rpartition("/")
        tree.setdefault(module, {})[name] = value
    return tree


def _in_order(by_kind: list[tuple[list[int], Params]]) -> Params:
    """The arrays of a module that several kinds have, stacked by layer. For each kind: the layers, and the arrays."""
    if len(by_kind) == 1:
        return by_kind[0][1]
    order = np.argsort([layer for layers, _ in by_kind for layer in layers])
    return jax.tree.map(lambda *stacks: jnp.concatenate(stacks)[order], *(leaves for _, leaves in by_kind))
