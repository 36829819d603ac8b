"""The memory of one device: the arrays that must exist at once, and the largest parts of a compiled training step."""

import math

import jax

from mesh_transformer.parallel.holdings import bytes_per_device
from mesh_transformer.train.step import TrainProgram


def training_arrays(program: TrainProgram) -> dict[str, int]:
    """Bytes of the arrays of one device that exist at once in each step: less than a step needs.

    The norm of the gradient is computed before the first update, so the gradients of all parameters exist beside the
    state: in float32 if they are sums of several microbatches, else at least in the compute dtype.
    """
    state = program.abstract_state
    gradients = program.moments.abstract(state.params, program.axes)
    summed = program.config.optimizer.gradient_accumulation_steps > 1
    itemsize = 4 if summed else program.model.dtype.itemsize
    return {
        "parameters": bytes_per_device(state.params) + bytes_per_device(state.frozen),
        "moments": bytes_per_device(state.opt_state),
        "gradients": bytes_per_device(gradients) * itemsize // 4,
    }


def training_parts(program: TrainProgram, accumulation: int, batch: int, peak_bytes: int) -> dict[str, int]:
    """Bytes of one device by part. Their sum is `peak_bytes`.

    parameters, moments: the trained float32 parameters and the optimizer's slots, exact. frozen: the other parameters,
    exact; absent if all are trained. weights: the trained parameters in the compute dtype. gradients: of a microbatch
    in the compute dtype, and with several microbatches their float32 sums. logits: a chunk of float32 logits.
    activations: the rest, mostly activations and temporary arrays.
    """
    state, config = program.abstract_state, program.config
    trained = bytes_per_device(state.params)
    itemsize = jax.numpy.dtype(program.model.compute.dtype).itemsize
    cast = trained * itemsize // 4
    sums = trained if accumulation > 1 else 0
    positions = config.seq // program.loss_chunks(batch, config.seq)
    rows = program.partition.sharding("batch", "seq", "vocab").shard_shape(
        (batch, positions, program.model.decoder.padded_vocab)
    )
    parts = {
        "parameters": trained,
        **({"frozen": frozen} if (frozen := bytes_per_device(state.frozen)) else {}),
        "moments": bytes_per_device(state.opt_state),
        "weights": cast if itemsize < 4 else 0,
        "gradients": cast + sums,
        "logits": 4 * math.prod(rows),
    }
    # the parts do not all live at the peak
    over = max(sum(parts.values()) - peak_bytes, 0)
    parts["gradients"] -= min(over, parts["gradients"])
    return parts | {"activations": max(peak_bytes - sum(parts.values()), 0)}
