"""Checks of the exercises of chapter 8: each runs an answer and compares it with one device, or with a plain loop."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.estimate.hlo import collectives

DEVICES, EXPERTS = 4, 8


def check_places(answer: Callable[..., Any]) -> None:
    """Against a loop over the choices."""
    experts = np.random.default_rng(0).integers(0, EXPERTS, 40, np.int32)
    seen: Counter[int] = Counter()
    expected = []
    for expert in experts.tolist():
        expected.append(seen[expert])
        seen[expert] += 1
    found = np.asarray(answer(jnp.asarray(experts), EXPERTS))
    assert found.shape == (40,), f"expected 40 places, the answer has the shape {found.shape}"
    wrong = np.flatnonzero(found != expected)
    assert not len(wrong), (
        f"{len(wrong)} of 40 places are wrong: choice {wrong[0]} goes to expert {experts[wrong[0]]}, of which it is "
        f"number {expected[wrong[0]]} (from 0), and the answer is {found[wrong[0]]}"
    )


def check_balance_loss(answer: Callable[..., Any]) -> None:
    """Value, and gradient with the shares held fixed."""
    logits = np.random.default_rng(1).standard_normal((32, EXPERTS)).astype(np.float32)
    scores = np.asarray(jax.nn.softmax(logits))
    shares = np.bincount(np.argsort(-scores, axis=1)[:, :2].ravel(), minlength=EXPERTS) / 64

    def with_fixed_shares(logits: jax.Array) -> jax.Array:
        return EXPERTS * (shares * jax.nn.softmax(logits).mean(0)).sum()

    expected, expected_gradient = jax.value_and_grad(with_fixed_shares)(logits)
    found, gradient = jax.value_and_grad(lambda logits: answer(logits, 2))(logits)
    far = abs(float(found - expected))
    assert far < 1e-5, f"the loss is {found:.5f} and should be {expected:.5f}: do the shares of all experts sum to 1?"
    far = float(np.abs(gradient - expected_gradient).max() / np.abs(expected_gradient).max())
    assert far < 1e-4, (
        f"the gradient differs by {far:.2g} of its largest number: f must have no gradient, P must have one"
    )


def check_exchange(answer: Callable[..., Any]) -> None:
    """Each expert multiplies by its own matrix; four devices have two experts each."""
    random = np.random.default_rng(2)
    buffers = random.standard_normal((DEVICES, EXPERTS, 3, 5)).astype(np.float32)
    matrices = random.standard_normal((EXPERTS, 5, 5)).astype(np.float32)

    def on_device(buffer: jax.Array, matrices: jax.Array) -> jax.Array:
        def compute(x: jax.Array) -> jax.Array:
            assert x.shape[0::2] == (len(matrices), 5), (
                f"compute gets an array {x.shape}, and expects ({len(matrices)}, rows, 5): this device's experts first"
            )
            return jnp.einsum("erd,edf->erf", x, matrices)

        return answer(buffer[0], compute, DEVICES)[None]

    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("ep",))
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P("ep"), P("ep")), out_specs=P("ep"))
    program = jax.jit(run).lower(buffers, matrices).compile()
    found = np.asarray(program(buffers, matrices))
    expected = np.einsum("necd,edf->necf", buffers, matrices)
    far = np.abs(found - expected).max((2, 3))
    assert far.max() < 1e-4, (
        f"{(far > 1e-4).sum()} of {far.size} pairs of device and expert differ by up to {far.max():.2g}: "
        "did the rows of an expert get back to the device and the place that they came from?"
    )
    kinds = Counter(one.kind for one in collectives(program.as_text()))
    assert kinds == {"all-to-all": 2}, f"the results are right, but the program has {dict(kinds)}: two all-to-alls do"


def check_latent_scores(answer: Callable[..., Any]) -> None:
    """The products, and that no array of the size of all keys is made."""
    random, (heads, dims, rank, positions) = np.random.default_rng(3), (3, 7, 5, 11)
    q, latents, keys = (
        random.standard_normal(shape).astype(np.float32)
        for shape in ((heads, dims), (positions, rank), (heads, rank, dims))
    )
    expected = np.einsum("hd,tr,hrd->ht", q, latents, keys)
    found = np.asarray(answer(q, latents, keys))
    assert found.shape == expected.shape, f"expected the shape {expected.shape}, the answer has {found.shape}"
    far = np.abs(found - expected).max()
    assert far < 1e-4, f"the scores differ by {far:.2g}, where the largest is {np.abs(expected).max():.2g}"
    made = [shape for shape in _shapes(jax.make_jaxpr(answer)(q, latents, keys).jaxpr) if positions in shape]
    largest = max(map(math.prod, made), default=0)
    assert largest <= positions * max(heads, rank), (
        f"an array of {largest} numbers is made, which is more than latents or scores have: multiply keys into q first"
    )


def _shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """The shapes of all results of a traced function."""
    for equation in jaxpr.eqns:
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from _shapes(inner.jaxpr)
        yield from (variable.aval.shape for variable in equation.outvars)
