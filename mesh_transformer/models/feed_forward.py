"""Feed-forward layers of a block, as Haiku modules.

Shapes: B sequences, T positions, D residual width, F feed-forward width, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import haiku as hk
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer import spec
from mesh_transformer.models.modules import Context, Linear, columns, parameter
from mesh_transformer.models.stack import Means
from mesh_transformer.ops import experts as routed
from mesh_transformer.ops.linear import add_bias, matmul, row
from mesh_transformer.parallel.sharding import constrain

_ROUTER, _EXPERTS = "router", "experts"


def is_router(module: str) -> bool:
    """Whether a module is a router, by its name. The parameters of routers stay float32 in any compute dtype."""
    return module.rpartition("/")[2] == _ROUTER


# Without jax.checkpoint the backward pass keeps five tensors of the activation's size.
_ACTIVATIONS: dict[spec.Activation, Callable[[jax.Array], jax.Array]] = {
    "gelu": jax.checkpoint(functools.partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": jax.checkpoint(functools.partial(jax.nn.gelu, approximate=True)),
    "silu": jax.checkpoint(jax.nn.silu),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}


class FeedForward:
    """The core of the feed-forward layer (`spec.Dense`): the products of the projections `inputs` -> the input of the
    projection `out`, all (B, T, F)."""

    def __init__(self, ff: spec.Dense, d_model: int, out_stddev: float, name: str):
        self.ff, self.name = ff, name
        arrays = spec.with_outputs(ff.arrays(d_model), out_stddev)
        with hk.name_scope(name):
            self.inputs = [Linear.of(arrays, name) for name in ff.inputs]
            self.keys: Sequence[Linear] = ()
            self.out = Linear.of(arrays, "out")

    def apply(self, x_BTD: jax.Array) -> jax.Array:
        """The feed-forward output before its bias: (B, T, D) -> (B, T, D)."""
        return row([self(*columns(x_BTD, self.inputs))], [self.out.w])

    def __call__(self, *products: jax.Array, ctx: Context | None = None) -> jax.Array:
        activation = _ACTIVATIONS[self.ff.activation]
        with jax.named_scope(self.name):
            hidden, *gate = (checkpoint_name(constrain(y, "batch", "seq", "mlp"), "mlp_hidden") for y in products)
            return activation(*gate) * hidden if gate else activation(hidden)


class ExpertMatrices(hk.Module):
    """The parameters of all experts: gate (or None) and in (E, D, F), out (E, F, D), and their biases."""

    def __init__(self, arrays: spec.Arrays, name: str):
        super().__init__(name)
        values = {name: parameter(name, array) for name, array in arrays.items()}
        self.gate, self.into, self.out = values.get("gate"), values["in"], values["out"]
        self.biases = routed.Biases(values.get("gate_b"), values.get("in_b"), values.get("out_b"))


class Router(hk.Module):
    """The logits of all experts, and the bias of the choice: (B, T, D) -> (B, T, E), (E,) or None; float32."""

    def __init__(self, arrays: spec.Arrays, name: str):
        super().__init__(name)
        self.arrays = arrays

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        values = {name: parameter(name, array) for name, array in self.arrays.items()}
        float32, exact = jnp.dtype(jnp.float32), jax.lax.Precision.HIGHEST
        logits_BTE = matmul(x_BTD.astype(float32), values["w"], float32, exact)
        return add_bias(logits_BTE, values["b"]) if "b" in values else logits_BTE, values.get("bias")


class Experts:
    """Routed experts, with the experts that all tokens share (`spec.ExpertsSpec`): (B, T, D) -> (B, T, D), and
    `Means`."""

    def __init__(self, experts: spec.ExpertsSpec, d_model: int, out_stddev: float, name: str):
        self.experts, self.name = experts, name
        self.inputs: Sequence[Linear] = ()
        self.keys: Sequence[Linear] = ()
        self.out = None
        arrays = spec.with_outputs(experts.arrays(d_model), out_stddev)
        with hk.name_scope(name):
            self.router = Router(spec.inside(_ROUTER, arrays), name=_ROUTER)
            self.matrices = ExpertMatrices(spec.inside(_EXPERTS, arrays), name=_EXPERTS)
            self.shared = None
            if experts.shared is not None:
                self.shared = FeedForward(experts.shared, d_model, out_stddev, name="shared")
            self.shared_gate = Linear.of(arrays, "shared_gate") if experts.shared_gate else None

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Means]:
        # the name in profiles
        with jax.named_scope(self.name):
            logits_BTE, bias_E = self.router(x_BTD)
            routing = routed.route(self.experts.router, logits_BTE, bias_E)
            activation = _ACTIVATIONS[self.experts.activation]
            matrices = self.matrices.gate, self.matrices.into, self.matrices.out
            y_BTD, dropped = routed.apply(ctx.dispatch, x_BTD, routing, *matrices, activation, self.matrices.biases)
        choices = routed.total(jnp.float32(routing.experts_BTk.size))
        means = {**routed.statistics(logits_BTE, routing, ctx.real_BT), "dropped": dropped / choices}
        if self.shared is None:
            return y_BTD, means
        shared_BTD = self.shared.apply(x_BTD)
        if self.shared_gate is not None:
            shared_BTD = shared_BTD * jax.nn.sigmoid(self.shared_gate(x_BTD))
        return y_BTD + shared_BTD, means
