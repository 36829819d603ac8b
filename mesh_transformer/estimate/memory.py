"""The largest parts of the memory of a training step on one device."""

import math
from typing import Any

import jax

from mesh_transformer.train.step import TrainProgram


def bytes_per_device(tree: Any) -> int:
    """The bytes of one device of a tree of `jax.ShapeDtypeStruct` with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def training_parts(program: TrainProgram, accumulation: int, batch: int, peak_bytes: int) -> dict[str, int]:
    """Bytes of one device by part. Their sum is `peak_bytes`.

    parameters, moments: the float32 parameters and the optimizer's slots, exact. weights: the parameters in the compute
    dtype. gradients: those of a microbatch in the compute dtype, and with several microbatches their float32 sums.
    logits: a chunk of float32 logits. activations: the rest, most of which are activations and temporary arrays.
    """
    state, config = program.abstract_state, program.config
    parameters = bytes_per_device(state.params)
    itemsize = jax.numpy.dtype(program.model.compute.dtype).itemsize
    cast = parameters * itemsize // 4
    sums = parameters if accumulation > 1 else 0
    positions = config.seq // program.loss_chunks(batch, config.seq)
    rows = program.partition.sharding("batch", "seq", "vocab").shard_shape(
        (batch, positions, program.model.decoder.padded_vocab)
    )
    parts = {
        "parameters": parameters,
        "moments": bytes_per_device(state.opt_state),
        "weights": cast if itemsize < 4 else 0,
        "gradients": cast + sums,
        "logits": 4 * math.prod(rows),
    }
    # the parts do not all live at the peak
    over = max(sum(parts.values()) - peak_bytes, 0)
    parts["gradients"] -= min(over, parts["gradients"])
    return parts | {"activations": max(peak_bytes - sum(parts.values()), 0)}
