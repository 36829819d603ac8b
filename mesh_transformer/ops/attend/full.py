"""Attention of whole sequences in which each query sees every key, as in encoders.

Shapes: as in `ops.attend.causal`.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.errors import UserError
from mesh_transformer.ops.attend.causal import attention_logits, fold_heads, unfold_heads
from mesh_transformer.ops.attend.kernels import PLAIN
from mesh_transformer.parallel.sharding import active, constrain


@dataclasses.dataclass(frozen=True)
class Full:
    """An `Attend` without a causal mask.

    Where devices split the positions, each gathers all keys and values. The order of the positions has no effect.
    """

    view: ClassVar = None
    bias_BHTS: jax.Array | None = None  # B is 1
    segments_BT: jax.Array | None = None  # int32: a query sees the keys of its own segment only; None for one segment

    def __call__(
        self,
        q_BTHK: jax.Array,
        k_BTJK: jax.Array,
        v_BTJV: jax.Array,
        *,
        scale: float,
        window: jax.Array | int | None = None,
        softcap: float | None = None,
    ) -> jax.Array:
        """See `Attend`.

        Raises:
            UserError: there is a window, which counts keys before a query; or the partition names a kernel.
        """
        partition = active()
        if window is not None:
            raise UserError("attention(causal=False) has no window: leave out the window of its Context")
        if partition is not None and partition.attention not in ("auto", PLAIN):
            raise UserError(f"the kernel {partition.attention} computes causal attention only: use attention='auto'")
        k_BHSK, v_BHSV = (
            constrain(rearrange(x, "b s j k -> b j s k"), "batch", "kv_heads", None, None) for x in (k_BTJK, v_BTJV)
        )
        shared, length = q_BTHK.shape[2] // k_BTJK.shape[2], q_BTHK.shape[1]
        if self.segments_BT is None:
            sees_B1TS = jnp.ones((1, 1, length, length), bool)
        else:
            sees_B1TS = (self.segments_BT[:, :, None] == self.segments_BT[:, None])[:, None]
        q_BTHK = fold_heads(q_BTHK, shared)
        logits_BHTS = attention_logits(q_BTHK, [k_BHSK], sees_B1TS, self.bias_BHTS, scale, softcap)
        weights_BHTS = jax.nn.softmax(logits_BHTS, axis=-1).astype(q_BTHK.dtype)
        mixed_BTHV = unfold_heads(jnp.einsum("bhts,bhsk->bthk", weights_BHTS, v_BHSV), shared)
        # the policies of compute.remat refer to the output of attention by this name
        return checkpoint_name(mixed_BTHV, "attn_out")
