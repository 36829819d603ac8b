"""Checks of the exercises of chapter 4, against one device, the compiled program and published figures."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mesh_transformer.estimate.hlo import collectives

WIDTH, ROWS = 128, 32
TOLERANCE = 1e-5


def _mesh():
    return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))


def check_all_reduce(answer):
    """Equal to the sum, and made of a reduce-scatter and a gather."""
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    mapped = jax.shard_map(lambda x: answer(x[0], "fsdp")[None], mesh=_mesh(), in_specs=P("fsdp"), out_specs=P("fsdp"))
    found = np.asarray(jax.jit(mapped)(x))
    assert found.shape == (8, 64), f"each device must return the whole sum, (64,); yours have {found.shape[1:]}"
    far = np.abs(found - x.sum(0)).max()
    assert far < TOLERANCE, f"the sum is wrong by {far:.2g}"
    kinds = [one.kind for one in collectives(jax.jit(mapped).lower(x).compile().as_text())]
    assert sorted(kinds) == ["all-gather", "reduce-scatter"], (
        f"the compiled program has {', '.join(kinds) or 'no communication'}: use psum_scatter, then all_gather"
    )


def check_zero_bytes(answer):
    """Figure 1 of the ZeRO paper, and float32."""
    published = [120, 31.4, 16.6, 1.875]
    for stage, expected in enumerate(published):
        found = answer(7.5e9, 64, stage, 2, 2, 12) / 1e9
        assert abs(found - expected) < 0.05, (
            f"stage {stage}: the paper has {expected} GB for 7.5 billion parameters on 64 devices, you have {found:.4g}"
        )
    found = answer(1000, 8, 1, 4, 4, 8)
    assert found == 9000, f"1,000 parameters in float32, 8 devices, ZeRO-1: 9,000 bytes, you have {found:.6g}"


def _layer(x, w):
    return x + jnp.tanh(x @ w)


def _loss(x, targets):
    return jnp.square(x[:, 0] - targets).mean()


def _problem(layers):
    random = np.random.default_rng(0)
    weights = (random.standard_normal((layers, WIDTH, WIDTH)) / 25).astype(np.float32)
    inputs = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    return weights, inputs, inputs[:, 1]


def check_fsdp_gradient(answer):
    """Equal to one device; the temporary arrays do not grow by a matrix for each layer."""

    def whole(weights, inputs, targets):
        x, _ = jax.lax.scan(lambda x, w: (_layer(x, w), None), inputs, weights)
        return _loss(x, targets)

    def step(weights, inputs, targets):
        return answer(_layer, _loss, weights, inputs, targets, _mesh())

    problem = _problem(3)
    found, right = np.asarray(jax.jit(step)(*problem)), np.asarray(jax.jit(jax.grad(whole))(*problem))
    assert found.shape == right.shape, f"the gradient must be {right.shape} like the weights, not {found.shape}"
    far = np.linalg.norm(found - right) / np.linalg.norm(right)
    ratio = np.linalg.norm(found) / np.linalg.norm(right)
    guess = " It is 8 times too long: the gather's derivative sums." if abs(ratio - 8) < 1e-3 else ""
    assert far < TOLERANCE, f"the gradient differs from one device's by {far:.2g} of its norm.{guess}"
    compiled = [jax.jit(step).lower(*_problem(layers)).compile() for layers in (4, 12)]
    few, many = (program.memory_analysis().temp_size_in_bytes for program in compiled)
    matrices = (many - few) / 8 / (4 * WIDTH * WIDTH)
    assert matrices < 0.6, (
        f"each layer adds {matrices:.2f} whole matrices to the temporary arrays of a device. Gather inside the loop "
        "over layers, and put jax.checkpoint around gather and layer together"
    )
    gathers = [one for one in collectives(compiled[0].as_text()) if one.kind == "all-gather"]
    assert gathers, "the compiled program gathers nothing: are the weights split?"


def check_hidden_from(answer):
    """Balanced times of TPU v5e, with gradients of 2 and 4 bytes."""
    for gradient_bytes, expected in ((2, 197e12 / 90e9), (4, 1.5 * 197e12 / 90e9), (1, 197e12 / 90e9)):
        found = answer(197e12, 90e9, 2, gradient_bytes)
        assert abs(found / expected - 1) < 1e-6, (
            f"with gradients of {gradient_bytes} bytes: {expected:,.0f} tokens, you have {found:,.0f}. Both passes "
            "must be hidden, so the slower one decides"
        )
