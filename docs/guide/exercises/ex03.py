"""Exercises of chapter 3: fill in the functions, then run `python scripts/guide.py check 3`.

All take a mesh with one axis, "dp". A row is an index of the first dimension of `inputs` and `targets`, and
`row_losses(params, inputs, targets)` is the loss of each row, (B,). The number of rows is a multiple of the devices.
"""


def weighted_gradient(row_losses, params, inputs, targets, weights, mesh):
    """The gradient of sum(weights * losses) / sum(weights), a tree like `params`.

    Use `jax.shard_map`. Each device must compute the gradient of its own rows only. `weights` (B,) may differ much
    between the devices; a device may have zeros only.
    """
    raise NotImplementedError


def remove_the_sum(row_losses, params, inputs, targets, mesh):
    """Remove the psum from a data-parallel gradient of the mean loss. Which check fails, and by how much?

    Leave the pcast in: without it JAX adds a psum of its own. Returns two things. First the class of the exception that
    `jax.shard_map` raises without the psum. Then how wrong the gradient is if `check_vma=False` turns this check off:
    the norm of its difference from the gradient of all rows, divided by the norm of that gradient. Measure both; do not
    write them down.
    """
    raise NotImplementedError


def accumulate(row_losses, params, inputs, targets, weights, microbatches, mesh):
    """The same gradient as `weighted_gradient`, but each device computes its rows in so many microbatches.

    The devices must sum their gradients once, not once a microbatch. The number of microbatches divides the rows of a
    device. The function is called inside of `jax.jit`.
    """
    raise NotImplementedError


def noise_scale(small, small_squares, big, big_squares):
    """The gradient noise scale tr(Sigma) / |G|^2, in rows, from many steps at the same parameters.

    `small_squares` (steps,) are squared norms of gradients of `small` rows, and `big_squares` (steps,) of `big` rows.
    A single step may say nothing: its estimate of |G|^2 may be negative.
    """
    raise NotImplementedError
