"""Exercises of chapter 4: fill in the functions, then run `python scripts/guide.py check 4`."""


def all_reduce(x, axis):
    """The sum of the x of all devices of a mesh axis, without psum and without the compiler's all-reduce.

    It is called inside a `jax.shard_map`. x is (N,), and the number of devices divides N.
    """
    raise NotImplementedError


def zero_bytes(parameters, devices, stage, weights, gradients, optimizer):
    """The bytes on a device with ZeRO stage 0 (data parallel), 1, 2 or 3.

    `weights`, `gradients` and `optimizer` are the bytes of one parameter on one device without ZeRO.
    """
    raise NotImplementedError


def fsdp_gradient(layer, loss, weights, inputs, targets, mesh):
    """The gradient, with respect to `weights` (L, D, D), of the mean loss of all rows.

    `layer(x, w)` is one layer, and `loss(x, targets)` the mean loss of the rows that it gets. The function is called
    with whole arrays: write the `jax.shard_map` too. The mesh has the axis "fsdp". It splits rows, and dimension 1 of
    `weights` and of the gradient. Gather one layer at a time, forward and backward. No device may ever have the
    weights of all layers.
    """
    raise NotImplementedError


def hidden_from(operations, bandwidth, weight_bytes, gradient_bytes):
    """The tokens of a device from which FSDP's communication is hidden, both forward and backward.

    A device computes `operations` a second and receives `bandwidth` bytes a second. Forward, a layer of m parameters
    takes 2 m operations a token, and its weights are gathered. Backward, it takes 4 m, its weights are gathered again,
    and its gradient is reduce-scattered. A gathered weight has `weight_bytes`, a gradient on its way `gradient_bytes`.
    """
    raise NotImplementedError
