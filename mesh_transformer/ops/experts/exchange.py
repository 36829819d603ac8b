"""Each choice goes to the device of its expert, and its output comes back, by two all-to-alls.

Shapes: N tokens of a device, k choices of a token, D width, E experts, F width of an expert, n devices that split the
experts, e = E / n experts of a device, C rows of each expert, M rows for each device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.ops.experts.layer import Activation, Choices, Weights, batched_matmul, capacity_rows, of_rows
from mesh_transformer.ops.experts.rows import Queues, Rows, combine, spread

Axes = tuple[str, ...]


def exchanged(
    x_ND: jax.Array, choices: Choices, weights: Weights, activation: Activation, capacity: int | None, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """As `on_device`, on the devices of a `shard_map` that split the experts over the mesh axes `axes`: `weights` has
    the e experts of the device, and `choices` are among all E."""
    devices, own = jax.lax.axis_size(axes), len(weights.gate_EDF)
    experts_kN = choices.experts_Nk.T
    queues = Queues.of(experts_kN, devices * own)
    if capacity is None:
        return _all(x_ND, choices, queues, weights, activation, axes), jnp.zeros((), jnp.int32)
    rows = capacity_rows(queues, experts_kN, capacity)
    sent = rearrange(spread(x_ND, rows), "(n e c) d -> n e c d", n=devices, e=own)
    x_ECD = rearrange(_swap(sent, axes), "n e c d -> e (n c) d")
    y_ECD = weights.apply(x_ECD, batched_matmul, activation)
    back = _swap(rearrange(y_ECD, "e (n c) d -> n e c d", n=devices), axes)
    y_ND = combine(rearrange(back, "n e c d -> (n e c) d"), choices.weights_Nk.T, rows)
    return y_ND, jnp.maximum(queues.sizes_E - capacity, 0).sum()


def _all(
    x_ND: jax.Array, choices: Choices, queues: Queues, weights: Weights, activation: Activation, axes: Axes
) -> jax.Array:
    """The outputs of all choices. A device may get all choices of each other device: M = N k."""
    size, own = choices.experts_Nk.size, len(weights.gate_EDF)
    counts_ne = queues.sizes_E.reshape(-1, own)
    ends_n = jnp.cumsum(counts_ne.sum(1))
    device_kN = choices.experts_Nk.T // own
    place_kN = queues.order_kN - (ends_n - counts_ne.sum(1))[device_kN]
    rows = Rows.of(device_kN * size + place_kN, len(counts_ne) * size)
    sent = rearrange(spread(x_ND, rows), "(n m) d -> n m d", m=size)
    # each device sends the rows of expert 0 first: the number of a row's expert is that of experts that end before it
    ends_ne = jnp.cumsum(_swap(counts_ne, axes), axis=1)
    places_nme = jax.lax.broadcasted_iota(jnp.int32, (len(ends_ne), size, own), 1)
    experts_nm = (places_nme >= ends_ne[:, None]).sum(2, dtype=jnp.int32)
    x_MD = rearrange(_swap(sent, axes), "n m d -> (n m) d")
    y_MD = of_rows(x_MD, experts_nm.reshape(-1), weights, activation)
    back = _swap(rearrange(y_MD, "(n m) d -> n m d", m=size), axes)
    return combine(rearrange(back, "n m d -> (n m) d"), choices.weights_Nk.T, rows)


def _swap(x: jax.Array, axes: Axes) -> jax.Array:
    """(n, ...) -> (n, ...): from device j, what it has for this device."""
    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
