"""A model on a mesh: where each parameter is, and the placements for training and for decoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mesh_transformer import platforms
from mesh_transformer.config import Config
from mesh_transformer.config.mesh import MeshAxes, training_rules, whole_sequence_rules
from mesh_transformer.models.model import Model
from mesh_transformer.ops.attend.kernel import Case
from mesh_transformer.ops.attend.kernels import Setting, cases_of_kinds, choose, resolved
from mesh_transformer.parallel.mesh import make_hybrid_mesh
from mesh_transformer.parallel.sharding import Params, Partition, constrain_tree
from mesh_transformer.spec import Decoder, Layer


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """A model on a mesh: every compiled program is made from one. It allocates nothing."""

    model: Model
    partition: Partition

    @classmethod
    def of(cls, config: Config, devices: Sequence[jax.Device]) -> Placement:
        """The model and the mesh of a config, split as in training. `mesh.overlap_tp` "auto" is false here: see
        `estimate.overlap.resolve`.

        Raises:
            UserError: the devices do not fit the mesh, or belong to several slices and `mesh.dcn` does not fit them.
        """
        shape, rules = config.mesh.shape(len(devices)), training_rules(config.mesh)
        platform = devices[0].platform
        compute = platforms.resolve(config.compute, platform)
        compute = compute.model_copy(update={"attention": resolved(compute.attention, platform)})
        model = Model(config.decoder, compute, config.mesh.virtual_stages(shape))
        mode, overlap_tp = config.mesh.context_mode, config.mesh.overlap_tp is True
        mesh = make_hybrid_mesh(config.mesh, shape, platforms.by_slice(devices))
        partition = Partition(mesh, rules, context_mode=mode, overlap_tp=overlap_tp, attention=compute.attention)
        placement = cls._on_partition(model, partition)
        placement.kernels(config.seq, documents=config.data.packing == "documents")
        return placement

    def kernels(self, length: int, *, documents: bool = False) -> dict[Layer, str]:
        """The attention kernel of each kind of layer, or "plain": see `cases`.

        Raises:
            UserError: `compute.attention` names a kernel that cannot compute a layer.
        """
        cases = self.cases(length, documents=documents)
        return {kind: choose(self.partition.attention, case) for kind, case in cases.items()}

    def cases(self, length: int, *, documents: bool = False) -> dict[Layer, Case]:
        """The attention of each kind of layer in training.

        Args:
            length: positions of a sequence.
            documents: whether a sequence has several, each with its own attention.
        """
        target, mode = self.partition.target, self.partition.context_mode
        dtype, parts = self.model.dtype.name, self.partition.size("seq")
        ring = None if parts == 1 or mode == "ulysses" else mode
        if ring is not None:
            length //= parts * (2 if mode == "zigzag" else 1)
        return cases_of_kinds(self.model.decoder, target, dtype, length, ring, segments=documents)

    def with_attention(self, setting: Setting) -> Placement:
        """This model on this mesh, with other kernels of attention."""
        return Placement(self.model, dataclasses.replace(self.partition, attention=setting))

    @classmethod
    def _on_partition(cls, model: Model, partition: Partition) -> Placement:
        return cls(model, with_whole_heads(partition, model.decoder))

    def whole_sequences(self) -> Placement:
        """This model and mesh, for programs in which each device has all positions of a sequence."""
        rules = whole_sequence_rules(dict(self.partition.mesh.shape), self.model.decoder.sizes)
        rules = {**rules, "batch": self.partition.rules["batch"]}
        return self._on_partition(self.model, dataclasses.replace(self.partition, rules=rules, whole=frozenset()))

    def for_decoding(self) -> Placement:
        """`whole_sequences` with every sequence on every data-parallel replica: for `infer.engine`."""
        return self.whole_sequences().with_rules(batch=None)

    def with_rules(self, **rules: MeshAxes) -> Placement:
        """This model on this mesh, with other sharding rules for some names."""
        return Placement(self.model, self.partition.with_rules(**rules))

    def size(self, name: str) -> int:
        """Devices that split a named dimension."""
        return self.partition.size(name)

    @property
    def shardings(self) -> Params:
        """The sharding of each parameter."""
        return self.partition.shardings(self.model.axes)

    def abstract(self, dtype: jnp.dtype) -> Params:
        """The parameters as `jax.ShapeDtypeStruct` for arithmetic in this dtype with their shardings."""
        shapes = self.model.shapes
        typed = jax.tree.map(lambda x, leaf_dtype: x.update(dtype=leaf_dtype), shapes, self.model.dtypes(shapes, dtype))
        return self.partition.abstract(typed, self.model.axes)

    def in_compute_dtype(self, params: Params) -> Params:
        """All parameters in the compute dtype, sharded as stored. Those that are so already are not copied."""
        targets = self.abstract(self.model.dtype)
        leaves, tree = jax.tree.flatten(params)
        pairs = list(zip(leaves, jax.tree.leaves(targets), strict=True))
        others = [(x, like) for x, like in pairs if not _is_like(x, like)]
        if others:
            arrays, likes = zip(*others, strict=True)
            cast = iter(_cast_like(tuple(like.dtype for like in likes), tuple(like.sharding for like in likes))(arrays))
        return jax.tree.unflatten(tree, [x if _is_like(x, like) else next(cast) for x, like in pairs])

    def cast(self, params: Params) -> Params:
        """Inside a program: all parameters in the compute dtype, sharded as stored."""
        return constrain_tree(self.model.cast(params), self.partition, self.model.axes)


def _is_like(x: jax.Array, like: jax.ShapeDtypeStruct) -> bool:
    return x.dtype == like.dtype and x.sharding.is_equivalent_to(like.sharding, x.ndim)


# a program for each set of dtypes and shardings
@functools.lru_cache(maxsize=8)
def _cast_like(dtypes: tuple[jnp.dtype, ...], shardings: tuple[jax.sharding.Sharding, ...]) -> jax.stages.Wrapped:
    def cast(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True))

    return jax.jit(cast, out_shardings=shardings)


def with_whole_heads(partition: Partition, decoder: Decoder) -> Partition:
    """The partition of a model: each device has all heads of keys and values if it cannot divide their number."""
    divided = decoder.kv_heads % partition.size("kv_heads") == 0
    return partition if divided else partition.keep_whole("kv_heads")
