"""Our answers to the exercises of chapter 3."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P


def weighted_gradient(row_losses, params, inputs, targets, weights, mesh):
    """Sum numerator and denominator over the devices, and divide last."""
    return accumulate(row_losses, params, inputs, targets, weights, 1, mesh)


def remove_the_sum(row_losses, params, inputs, targets, mesh):
    """The check of shard_map's output fails first, because the gradient is varying. Without it nothing complains."""

    def loss(params, inputs, targets):
        return row_losses(params, inputs, targets).mean()

    def without_sum(params, inputs, targets):
        return jax.grad(loss)(jax.lax.pcast(params, "dp", to="varying"), inputs, targets)

    mapped = functools.partial(jax.shard_map, without_sum, mesh=mesh, in_specs=(P(), P("dp"), P("dp")), out_specs=P())
    try:
        jax.eval_shape(mapped(), params, inputs, targets)
        raise AssertionError("shard_map has accepted a gradient that is not summed")
    except ValueError as found:
        error = type(found)
    wrong = jax.jit(mapped(check_vma=False))(params, inputs, targets)
    right = jax.grad(loss)(params, inputs, targets)
    return error, float(optax.tree.norm(optax.tree.sub(wrong, right)) / optax.tree.norm(right))


def accumulate(row_losses, params, inputs, targets, weights, microbatches, mesh):
    """Each device adds up the gradients of its sums; psum and division come after the loop."""

    def weighted_sum(params, inputs, targets, weights):
        return (row_losses(params, inputs, targets) * weights).sum()

    def on_device(params, *rows):
        own = jax.lax.pcast(params, "dp", to="varying")

        def microbatch(total, rows):
            return optax.tree.add(total, jax.grad(weighted_sum)(own, *rows)), None

        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), rows)
        total, _ = jax.lax.scan(microbatch, optax.tree.zeros_like(own), parts)
        total, weight = jax.lax.psum((total, rows[-1].sum()), "dp")
        return jax.tree.map(lambda g: g / weight, total)

    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("dp"), P("dp"), P("dp")), out_specs=P())
    return jax.jit(mapped)(params, inputs, targets, jnp.asarray(weights))


def noise_scale(small, small_squares, big, big_squares):
    """Average first, then divide: a mean of quotients is biased."""
    small_square, big_square = np.mean(small_squares), np.mean(big_squares)
    signal = (big * big_square - small * small_square) / (big - small)
    noise = (small_square - big_square) / (1 / small - 1 / big)
    return noise / signal
