"""Routed experts on the devices of a partition."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.ops.experts.layer import Activation, Weights, on_device
from mesh_transformer.ops.experts.routing import Routing, total


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """How the choices reach the experts.

    exchange: where devices split the experts: tokens: each choice goes to the device of its expert and back; gather: each
    device gets all tokens of its group. capacity_factor: of a device's tokens, an expert computes at most this multiple
    of the choices that an expert has on average; the others are dropped. None: all are computed.
    """

    exchange: Literal["tokens", "gather"] = "tokens"
    capacity_factor: float | None = None

    def capacity(self, choices: int, experts: int) -> int | None:
        """The rows of each expert for `choices` choices among `experts` experts; None: as many as there are."""
        if self.capacity_factor is None:
            return None
        return min(choices, math.ceil(self.capacity_factor * choices / experts))


def apply(
    dispatch: Dispatch,
    x_BTD: jax.Array,
    routing: Routing,
    gate_EDF: jax.Array,
    in_EDF: jax.Array,
    out_EFD: jax.Array,
    activation: Activation,
) -> tuple[jax.Array, jax.Array]:
    """The sum over each token's experts of weight * (activation(x gate) * (x in)) out.

    Returns:
        (B, T, D) of x's dtype, and the number of choices that were dropped, over all devices, float32.
    """
    weights = Weights(gate_EDF, in_EDF, out_EFD)
    x_ND, weights_Nk, experts_Nk = (
        rearrange(x, "b t d -> (b t) d") for x in (x_BTD, routing.weights_BTk, routing.experts_BTk)
    )
    capacity = dispatch.capacity(experts_Nk.size, len(gate_EDF))
    y_ND, dropped = on_device(x_ND, weights_Nk, experts_Nk, weights, activation, capacity)
    return y_ND.reshape(x_BTD.shape), total(dropped.astype(jnp.float32))
