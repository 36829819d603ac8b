"""Attention by cuDNN's flash kernels, for GPUs of compute capability 8.0 and later. They never write logits to memory.

Shapes: as in `ops.attend.causal`.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.ops.attend.kernel import Call, Case, Kernel, on_each_device, split_heads
from mesh_transformer.parallel.sharding import Partition

# compute capability: the largest dims of a head
_HEAD_DIMS = {8: 128, 9: 256}


def refuses(case: Case) -> str | None:
    """See `Kernel`. Heads as in `check_is_flash_attention` of JAX."""
    major = case.target.generation.partition(".")[0]
    newest = int(major) if case.target.platform == "gpu" and major.isdecimal() else 0
    if newest < min(_HEAD_DIMS):
        found = f"of {case.target.generation or 'unknown'}" if case.target.platform == "gpu" else "no GPU"
        return f"needs a GPU of compute capability {min(_HEAD_DIMS)}.0 or later, and the device is {found}"
    most = _HEAD_DIMS[min(newest, max(_HEAD_DIMS))]
    if case.dtype != "bfloat16":
        return f"needs compute.dtype bfloat16, and it is {case.dtype}"
    if case.head_dim != case.value_dim:
        return f"needs heads of one size, and queries have {case.head_dim} dims, values {case.value_dim}"
    if case.head_dim % 8 or case.head_dim > most:
        return f"needs heads of up to {most} dims, a multiple of 8, on this GPU, and they have {case.head_dim}"
    if case.bias or case.softcap or case.segments:
        kind = "a bias of the logits" if case.bias else "a soft cap" if case.softcap else "segments"
        return f"cannot compute {kind}"
    if case.windows is None or len(case.windows) > 1:
        return "needs the same window in all layers"
    if case.ring is not None:
        return f"cannot compute the blocks of mesh.context_mode {case.ring}: set mesh.context_mode=ulysses"
    return None


def attend(partition: Partition, call: Call) -> jax.Array:
    """See `Kernel`."""
    (window,) = call.windows
    seen = None if window is None else (window - 1, 0)

    def of_device(q_BTHK: jax.Array, k_BTJK: jax.Array, v_BTJK: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q_BTHK,
            k_BTJK,
            v_BTJK,
            scale=call.scale,
            is_causal=True,
            local_window_size=seen,
            implementation="cudnn",
        )

    split = split_heads(partition)
    run = on_each_device(partition, of_device, split, split)
    return checkpoint_name(run(call.q_BTHK, call.k_BTJK, call.v_BTJV), "attn_out")


KERNEL = Kernel(refuses, attend)
