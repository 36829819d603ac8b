"""Expert parallelism: each device has some of the experts, and tokens travel to theirs (GShard, arXiv:2006.16668).

    python -m examples.expert_parallelism

The feed-forward layer is 8 experts, and a router sends each token to 2 of them. The rules split "experts" over the mesh
axis ep, and "batch" over dp and ep. Each device sends its tokens to the devices of their experts, which is an
all-to-all, and gets the results back. The balance loss keeps the router from sending all tokens to few experts. It
needs the load of the experts over the whole batch: what each device sees is not enough.
"""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from examples import common
from mesh_transformer.models import Embedding, HaikuModel, Linear, Norm, NormSpec, RouterSpec
from mesh_transformer.ops import Dispatch, apply_experts, route, router_statistics
from mesh_transformer.parallel import Partition, constrain, dimension_rules, with_axes
from mesh_transformer.train import ModelFunctions, Optimizer, gradients

STEPS, MICROBATCHES, ROWS, POSITIONS, VOCABULARY = 10, 1, 8, 16, 64
WIDTH, HIDDEN, LAYERS, EXPERTS = 64, 128, 4, 8
ROUTER = RouterSpec(chosen=2, normalize=True)
BALANCE = 0.01
MESH = {"dp": 2, "ep": 4}


def embedding(tokens: jax.Array) -> jax.Array:
    """Tokens (B, T + 1) -> (B, T, D)."""
    return Embedding(VOCABULARY, WIDTH, stddev=0.1, name="tokens")(tokens[:, :-1])


def matrices(name: str, columns: int, rows: int, *axes: str) -> jax.Array:
    """A matrix for each expert."""
    init = hk.initializers.TruncatedNormal(1 / np.sqrt(columns))
    return hk.get_parameter(name, (EXPERTS, columns, rows), init=with_axes(init, "experts", *axes))


def block(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A layer: (B, T, D) -> (B, T, D), and the means of its router over all tokens."""
    normed = constrain(Norm(NormSpec(), name="norm")(x), "batch", "block_seq", "act_embed")
    # in float32 in every model: rounded scores choose other experts
    logits = Linear(WIDTH, EXPERTS, ("embed", None), name="router")(normed)
    routing = route(ROUTER, logits)
    gate, into = (matrices(name, WIDTH, HIDDEN, "embed", "mlp") for name in ("gate", "in"))
    out = matrices("out", HIDDEN, WIDTH, "mlp", "embed")
    mixed, _ = apply_experts(Dispatch("tokens"), normed, routing, gate, into, out, jax.nn.silu)
    return x + mixed, router_statistics(logits, routing)


def balance(means: dict[str, jax.Array]) -> jax.Array:
    """The part of the loss that one layer adds."""
    return BALANCE * means["balance"] / LAYERS


def head(x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """The sum of this microbatch's losses, divided by the number of tokens of a whole one."""
    logits = Linear(WIDTH, VOCABULARY, ("embed", "vocab"), name="logits")(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.sum() / (ROWS * POSITIONS), None


def partition(mesh: Mesh) -> Partition:
    """The rules: which axis of the mesh splits which dimension."""
    return Partition(mesh, dimension_rules())


def train(partition: Partition) -> common.Run:
    """The training step equals the step on one device."""
    tokens = common.sequences(STEPS, MICROBATCHES, ROWS, POSITIONS, VOCABULARY)
    model = HaikuModel(embedding, block, head, layers=LAYERS, example=jnp.zeros(tokens.shape[2:], jnp.int32))
    parts = ModelFunctions(model.embed, model.layer, model.loss, model.axes, layer_loss=balance)
    optimizer = Optimizer.named("adam", model.axes, **common.ADAM)

    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        gradient, metrics, _ = gradients(parts, params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, metrics["loss"]

    return common.fit(partition, model, optimizer, step, tokens)


if __name__ == "__main__":
    common.main(__spec__.name, train, partition, MESH)
