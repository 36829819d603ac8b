"""Feed-forward layers of a block, as Haiku modules.

Shapes: B sequences, T positions, D residual width, F feed-forward width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import haiku as hk
import jax
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.families import spec
from mesh_transformer.models.modules import Linear
from mesh_transformer.parallel.sharding import constrain

# Without jax.checkpoint the backward pass keeps five tensors of the activation's size.
_ACTIVATIONS: dict[spec.Activation, Callable[[jax.Array], jax.Array]] = {
    "gelu": jax.checkpoint(functools.partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": jax.checkpoint(functools.partial(jax.nn.gelu, approximate=True)),
    "silu": jax.checkpoint(jax.nn.silu),
    "relu": jax.nn.relu,
}


class FeedForward:
    """The feed-forward layer (`spec.Dense`) between its products: those of `inputs` -> the input of `out`, all
    (B, T, F)."""

    def __init__(self, ff: spec.Dense, d_model: int, out_stddev: float, name: str):
        self.ff, self.name = ff, name
        with hk.name_scope(name):
            names = ("in", "gate") if ff.gated else ("in",)
            self.inputs = [Linear(d_model, ff.d_ff, ("embed", "mlp"), bias=ff.bias, name=name) for name in names]
            self.out = Linear(ff.d_ff, d_model, ("mlp", "embed"), stddev=out_stddev, name="out")

    def __call__(self, *products: jax.Array) -> jax.Array:
        activation = _ACTIVATIONS[self.ff.activation]
        with jax.named_scope(self.name):
            hidden, *gate = (checkpoint_name(constrain(y, "batch", "seq", "mlp"), "mlp_hidden") for y in products)
            return activation(*gate) * hidden if gate else activation(hidden)
