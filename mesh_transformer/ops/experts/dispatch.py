"""Routed experts on the devices of a partition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.ops.experts.layer import (
    NO_BIASES,
    Activation,
    Biases,
    Choices,
    ExpertWeights,
    exchanged,
    on_device,
)
from mesh_transformer.ops.experts.routing import Routing, total
from mesh_transformer.ops.forms import FormMatrix
from mesh_transformer.ops.linear import Matrix
from mesh_transformer.parallel.sharding import Axes, Partition, active, platform

_Sums = tuple[jax.Array, jax.Array]
"""The outputs of the experts for each token, summed, and the number of choices that were dropped."""


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """How the choices of tokens reach the experts.

    exchange: how devices that split the experts communicate. tokens: each choice goes to the device of its expert and
    back. gather: each device gathers all tokens of its group.

    capacity_factor: the capacity of an expert is capacity_factor x (choices of the tokens on a device / experts). Later
    choices of a full expert are dropped. With None, the capacity is unlimited.
    """

    exchange: Literal["tokens", "gather"] = "tokens"
    capacity_factor: float | None = None

    def capacity(self, choices: int, experts: int) -> int | None:
        """The largest number of rows of an expert, for `choices` choices among `experts` experts; None if unlimited."""
        if self.capacity_factor is None:
            return None
        return min(choices, math.ceil(self.capacity_factor * choices / experts))


def apply(
    dispatch: Dispatch,
    x_BTD: jax.Array,
    routing: Routing,
    gate_EDF: Matrix | None,
    in_EDF: Matrix,
    out_EFD: Matrix,
    activation: Activation,
    biases: Biases = NO_BIASES,
) -> tuple[jax.Array, jax.Array]:
    """The sum over each token's experts of weight * (activation(x gate) * (x in)) out, or of weight * activation(x in)
    out without a gate. Each product plus its bias, if there is one.

    The active partition may split the batch, the positions, the experts and their widths, but not D.

    Returns:
        (B, T, D) of x's dtype, and the number of choices that were dropped, over all devices, float32.
    """
    group = ExpertDevices.of(dispatch)

    def one_device(x_BTD: jax.Array, weights_BTk: jax.Array, experts_BTk: jax.Array, weights: ExpertWeights) -> _Sums:
        x_ND, weights_Nk, experts_Nk = (rearrange(x, "b t d -> (b t) d") for x in (x_BTD, weights_BTk, experts_BTk))
        capacity = dispatch.capacity(experts_Nk.size, len(in_EDF))
        choices, all_experts = Choices(weights_Nk, experts_Nk), len(weights.in_EDF) == len(in_EDF)
        if group is None:
            y_ND, dropped = on_device(x_ND, choices, weights, activation, capacity, all_experts=True)
        elif group.sends_choices:
            y_ND, dropped = exchanged(x_ND, choices, weights, activation, capacity, group.experts)
        else:
            local_choices = choices.after(group.first_expert(len(weights.in_EDF)))
            y_ND, dropped = on_device(x_ND, local_choices, weights, activation, capacity, all_experts=all_experts)
        return y_ND.reshape(x_BTD.shape), dropped.astype(jnp.float32)

    run = one_device if group is None else group.map(one_device)
    weights = ExpertWeights(gate_EDF, in_EDF, out_EFD, biases)
    y_BTD, dropped = run(x_BTD, routing.weights_BTk, routing.experts_BTk, weights)
    return y_BTD, total(dropped)


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertDevices:
    """The devices that split the tokens, the experts or their widths, by the mesh axes of each of these.

    Each device has all choices of its tokens. It may have the tokens of all devices that split the experts.
    """

    partition: Partition
    batch: tuple[str, ...]
    seq: tuple[str, ...]
    experts: tuple[str, ...]
    mlp: tuple[str, ...]

    @classmethod
    def of(cls, dispatch: Dispatch) -> ExpertDevices | None:
        """The devices of the active partition; None with a single device."""
        partition = active()
        if partition is None or partition.mesh.size == 1:
            return None
        batch, seq, experts, mlp = (partition.axes(name) for name in ("batch", "seq", "experts", "mlp"))
        if partition.size("experts") == 1:
            experts = ()
        if dispatch.exchange == "gather":
            batch = tuple(axis for axis in batch if axis not in experts)
        return cls(partition, batch, seq, experts, mlp)

    @property
    def sends_choices(self) -> bool:
        """Whether the devices that split the experts have different tokens."""
        return bool(self.experts) and set(self.experts) <= set(self.batch)

    @property
    def gathers(self) -> tuple[str, ...]:
        """The axes that split the experts, if their devices have the same tokens."""
        return tuple(axis for axis in self.experts if axis not in self.batch)

    @property
    def same_weights(self) -> tuple[str, ...]:
        """The axes whose devices have the same weights. Each device computes a part of their gradients."""
        return tuple(axis for axis in (*self.batch, *self.seq) if axis not in self.experts)

    def first_expert(self, count: int) -> jax.Array:
        """The number of a device's first expert, if each has `count`."""
        return jax.lax.axis_index(self.experts) * count if self.experts else jnp.zeros((), jnp.int32)

    def map(self, function: Callable[..., _Sums]) -> Callable[..., _Sums]:
        """`function` on the shards of each device: of three arrays of all tokens, and of `ExpertWeights`.

        An array that several devices share gets a leading dimension, which these devices split. So the sums of outputs
        and gradients over the devices are outside of the `shard_map`, where the partitioner can join a sum with a split
        that follows.
        """
        mesh = self.partition.current_mesh
        tokens = P(self.gathers, self.mlp, self.batch, self.seq)
        axes = tuple(dict.fromkeys((*self.gathers, *self.mlp, *self.batch, *self.seq)))

        def one_device(x: jax.Array, weights: jax.Array, experts: jax.Array, parameters: ExpertWeights) -> _Sums:
            local_parameters = jax.tree.map(lambda parameter: parameter[0], parameters).with_out_bias(
                lambda b_E1D: b_E1D[:, 0]
            )
            y, dropped = function(x[0, 0], weights[0, 0], experts[0, 0], local_parameters)
            return y[None, None], dropped[None]

        def run(x: jax.Array, weights: jax.Array, experts: jax.Array, parameters: ExpertWeights) -> _Sums:
            parameters = parameters.with_out_bias(self._rows_of_bias)
            names = _names(parameters)
            specs = jax.tree.map(lambda _, axes: self._spec(axes), parameters, names)
            parameters = jax.tree.map(lambda x, axes: self._copies(x, self._with_copies(axes)), parameters, names)
            x, weights, experts = map(self._for_tokens, (x, weights, experts))
            y, dropped = jax.shard_map(
                one_device,
                mesh=mesh,
                in_specs=(tokens, tokens, tokens, specs),
                out_specs=(tokens, P(axes)),
                # all axes, as a Pallas kernel needs
                axis_names=set(mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes),
                # the outputs of Pallas kernels do not say over which devices they vary
                check_vma=platform() != "tpu",
            )(x, weights, experts, parameters)
            # of y's dtype: jnp.sum would send float32
            y_BTD = jax.lax.reduce_sum(self._split(jax.lax.reduce_sum(y, axes=(0,))), axes=(0,))
            # the devices that split the widths all count the same
            return y_BTD, dropped.sum() / self._size(self.mlp)

        return run

    def _rows_of_bias(self, b_ED: jax.Array) -> jax.Array:
        """A row for each device that splits the widths. Their outputs are summed: only the first one adds the bias."""
        return jnp.pad(b_ED[:, None], ((0, 0), (0, self._size(self.mlp) - 1), (0, 0)))

    def _with_copies(self, axes: Axes) -> tuple[str, ...]:
        """The mesh axes whose devices have copies of a parameter. A device computes a part of the gradient of one that
        the widths do not split."""
        return self.same_weights if "mlp" in axes else (*self.same_weights, *self.mlp)

    def _spec(self, axes: Axes) -> P:
        """How a parameter with these dimensions is split, after a dimension of copies."""
        split = {"experts": self.experts, "mlp": self.mlp}
        return P(self._with_copies(axes), *(split.get(name or "") for name in axes))

    def _for_tokens(self, x_BTD: jax.Array) -> jax.Array:
        return self._copies(self._split(self._copies(x_BTD, self.mlp)), self.gathers)

    def _split(self, x: jax.Array) -> jax.Array:
        """x, one part for each device that splits the widths, with its tokens split over all other devices: one sum and
        split over the devices that split the experts, and then one over the devices that split the widths."""
        spec = P(self.mlp, self.partition.axes("batch"), self.seq)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.partition.current_mesh, spec))

    def _copies(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return jnp.broadcast_to(x[None], (self._size(axes), *x.shape))

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.partition.mesh.shape[axis] for axis in axes)


def _names(weights: ExpertWeights) -> ExpertWeights:
    """A tree like `weights`, with the names of the dimensions in place of each array."""

    def of(w: Matrix | None, *dims: str) -> object:
        if w is None:
            return None
        return w.names() if isinstance(w, FormMatrix) else ("experts", *dims)

    columns, rows = ("embed", "mlp"), ("mlp", "embed")
    matrices = of(weights.gate_EDF, *columns), of(weights.in_EDF, *columns), of(weights.out_EFD, *rows)
    return ExpertWeights._make((*matrices, jax.tree.map(lambda _: ("experts", "mlp"), weights.biases)))
