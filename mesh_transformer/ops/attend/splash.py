"""Attention by JAX's splash kernel, for TPU v4 and later. It computes the blocks in which a query sees a key, and never
writes logits to memory.

Shapes: as in `ops.attend.causal`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mesh_transformer.ops.attend.kernel import (
    AttentionKernel,
    Call,
    Case,
    Windows,
    changed_arguments,
    on_each_device,
    split_heads,
)
from mesh_transformer.parallel.sharding import Partition, Specs, Tree

if TYPE_CHECKING:
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
        BlockSizes,
        SegmentIds,
        SplashAttentionKernel,
    )

# positions of the largest block of queries and of keys; the kernel needs multiples of the second number
_BLOCK, _LANES = 512, 128
_GENERATIONS = ("v4", "v5e", "v5p", "v6e", "v7x")
_HEAD_DIMS = (64, 256)
_DTYPES = ("bfloat16", "float32")
_MODULE = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
# the arguments of its backward pass that a kernel keeps by name; saved arrays and gradient follow them
_KEPT = (
    *("save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function"),
    *("attn_logits_soft_cap", "interpret"),
)
Mask = Literal["causal", "full"]
"""causal: the keys have the positions of the queries. full: a query sees all keys."""
Segments = tuple[jax.Array, jax.Array] | None
"""The segments of queries (B, T) and keys (B, S), int32: a query sees the keys of its own segment only. None
for one segment."""
_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array, jax.Array]
"""Queries, keys, values, segments, index of the window, output, and the logarithm of the softmax's normalizer,
(B, H, T) float32."""


def refuses(case: Case) -> str | None:
    """See `AttentionKernel`."""
    target, widths = case.target, (case.head_dim, case.value_dim)
    if target.platform != "tpu" or target.generation not in _GENERATIONS:
        device = f"TPU {target.generation}" if target.platform == "tpu" else target.platform.upper()
        return f"needs a TPU {', '.join(_GENERATIONS[:-1])} or {_GENERATIONS[-1]}, and the device is a {device}"
    if case.dtype not in _DTYPES:
        return f"needs compute.dtype {' or '.join(_DTYPES)}, and it is {case.dtype}"
    if case.length % _LANES:
        return f"needs a multiple of {_LANES} positions on a device, and there are {case.length}"
    if any(width % 8 or not _HEAD_DIMS[0] <= width <= _HEAD_DIMS[1] for width in widths):
        return f"needs heads of {_HEAD_DIMS[0]} to {_HEAD_DIMS[1]} dims, a multiple of 8, and they have {widths}"
    if case.bias:
        return "cannot add a bias to the logits, and this model learns one"
    if case.windows is None:
        return "needs windows that are known before the program runs"
    if case.ring == "gather":
        return "does not know the mask of mesh.context_mode gather before the program runs"
    if case.ring is not None and case.windows != (None,):
        return f"cannot compute windows with mesh.context_mode {case.ring}"
    return None


def unsupported() -> str | None:
    """See `AttentionKernel`."""
    return changed_arguments(_MODULE, "_splash_attention_bwd", (*_KEPT, "res", "do"))


@dataclasses.dataclass(frozen=True, eq=False)
class _SplashPlan:
    """The static arguments of an attention."""

    partition: Partition
    scale: float
    softcap: float | None
    windows: Windows

    @property
    def blocks(self) -> SplashBlocks:
        """The kernels of one device."""
        return SplashBlocks.of(self.partition, self.scale, self.softcap)

    def map(self, function: Callable[..., Tree], in_specs: Specs, out_specs: Specs) -> Callable[..., Tree]:
        """`function` of the plan, and of the arrays of one device."""
        return on_each_device(self.partition, functools.partial(function, self), in_specs, out_specs)

    def of_window(self, function: Callable[..., Tree], index: jax.Array | None, *arrays: object) -> Tree:
        """`function(window, *arrays)` for the window of this layer."""
        if index is None:
            return function(self.windows[0], *arrays)
        return jax.lax.switch(index, [functools.partial(function, window) for window in self.windows], *arrays)

    @property
    def specs(self) -> tuple[P, P, P]:
        """The splits of (B, T, H, K), (B, T) and (B, H, T)."""
        heads = split_heads(self.partition)
        return heads, P(heads[0]), P(heads[0], heads[2])


def attend(partition: Partition, call: Call) -> jax.Array:
    """See `AttentionKernel`. The policies of compute.remat refer to the saved arrays by the name "attn_out"."""
    plan = _SplashPlan(partition, call.scale, call.softcap, call.windows)
    return _attend(plan, call.q_BTHK, call.k_BTJK, call.v_BTJV, call.segments_BT, call.window_index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: _SplashPlan,
    q_BTHK: jax.Array,
    k_BTJK: jax.Array,
    v_BTJV: jax.Array,
    segments_BT: jax.Array | None,
    window_index: jax.Array | None,
) -> jax.Array:
    return _forward(plan, q_BTHK, k_BTJK, v_BTJV, segments_BT, window_index)[0]


def _forward(
    plan: _SplashPlan,
    q_BTHK: jax.Array,
    k_BTJK: jax.Array,
    v_BTJV: jax.Array,
    segments_BT: jax.Array | None,
    window_index: jax.Array | None,
) -> tuple[jax.Array, _Saved]:
    heads, rows, normalizer = plan.specs

    def of_device(plan: _SplashPlan, index: jax.Array | None, *arrays: object) -> tuple[jax.Array, jax.Array]:
        return plan.of_window(functools.partial(plan.blocks.forward, "causal"), index, *arrays)

    run = plan.map(of_device, (P(), heads, heads, heads, rows), (heads, normalizer))
    outputs = run(window_index, q_BTHK, k_BTJK, v_BTJV, None if segments_BT is None else (segments_BT, segments_BT))
    mixed, log_z = (checkpoint_name(x, "attn_out") for x in outputs)
    return mixed, (q_BTHK, k_BTJK, v_BTJV, segments_BT, window_index, mixed, log_z)


def _backward(plan: _SplashPlan, saved: _Saved, dy_BTHV: jax.Array) -> tuple[jax.Array | None, ...]:
    heads, rows, normalizer = plan.specs
    q, k, v, segments_BT, window_index, mixed, log_z = saved
    segments = None if segments_BT is None else (segments_BT, segments_BT)

    def of_device(plan: _SplashPlan, index: jax.Array | None, *arrays: object) -> tuple[jax.Array, ...]:
        return plan.of_window(functools.partial(plan.blocks.backward, "causal"), index, *arrays)

    run = plan.map(of_device, (P(), heads, heads, heads, rows, heads, normalizer, heads), (heads, heads, heads))
    dq, dk, dv = run(window_index, q, k, v, segments, mixed, log_z, dy_BTHV)
    return dq, dk, dv, None, None


_attend.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class SplashBlocks:
    """The kernels for the queries and keys of one device."""

    scale: float
    softcap: float | None
    # computed on a CPU, slowly: for tests
    interpret: bool

    @classmethod
    def of(cls, partition: Partition, scale: float, softcap: float | None) -> SplashBlocks:
        """The kernels for the devices of a partition."""
        return cls(scale, softcap, interpret=partition.target.platform == "cpu")

    def forward(
        self,
        mask: Mask,
        window: int | None,
        q_BTHK: jax.Array,
        k_BSJK: jax.Array,
        v_BSJV: jax.Array,
        segments: Segments,
    ) -> tuple[jax.Array, jax.Array]:
        """The output, (B, T, H, V) of q's dtype, and the logarithm of the softmax's normalizer, (B, H, T) float32."""
        kernel = self._kernel(mask, window, q_BTHK, k_BSJK)
        q, k, v = self._scaled(q_BTHK), _heads_first(k_BSJK), _heads_first(v_BSJV)
        with jax.named_scope(_mask_name(mask, window, q_BTHK.shape[1], k_BSJK.shape[1])):
            mixed, (log_z,) = jax.vmap(kernel)(q, k, v, _ids(segments))
        return rearrange(mixed, "b h t k -> b t h k"), log_z

    def backward(
        self,
        mask: Mask,
        window: int | None,
        q_BTHK: jax.Array,
        k_BSJK: jax.Array,
        v_BSJV: jax.Array,
        segments: Segments,
        mixed_BTHV: jax.Array,
        log_z_BHT: jax.Array,
        dy_BTHV: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The gradients of q, k and v, of their dtypes.

        Args:
            mixed_BTHV, log_z_BHT: the output and the softmax's normalizer over all keys that the queries see. The given
                keys may be a part of them.
        """
        kernel = self._kernel(mask, window, q_BTHK, k_BSJK)
        q, k, v = self._scaled(q_BTHK), _heads_first(k_BSJK), _heads_first(v_BSJV)
        pull = functools.partial(_library()._splash_attention_bwd, *(kernel.kwargs[name] for name in _KEPT))

        def gradients(
            given: tuple[jax.Array, ...], ids: SegmentIds | None, kept: tuple[jax.Array, ...], dy: jax.Array
        ) -> tuple[jax.Array, ...]:
            # without sinks
            saved = *given, ids, None, *kept, kernel.dq_mask_info, kernel.dkv_mask_info
            return pull(saved, dy)[3:6]

        kept, dy = (_heads_first(mixed_BTHV), log_z_BHT), _heads_first(dy_BTHV)
        with jax.named_scope(_mask_name(mask, window, q_BTHK.shape[1], k_BSJK.shape[1])):
            dq, dk, dv = jax.vmap(gradients)((q, k, v), _ids(segments), kept, dy)
        dq = (dq.astype(jnp.float32) * self.scale).astype(dq.dtype)
        dq, dk, dv = (rearrange(x, "b h t k -> b t h k") for x in (dq, dk, dv))
        return dq, dk, dv

    def _scaled(self, q_BTHK: jax.Array) -> jax.Array:
        """scale q, (B, H, T, K)."""
        return _heads_first((q_BTHK.astype(jnp.float32) * self.scale).astype(q_BTHK.dtype))

    def _kernel(self, mask: Mask, window: int | None, q_BTHK: jax.Array, k_BSJK: jax.Array) -> SplashAttentionKernel:
        masks = _masks()
        shape = q_BTHK.shape[1], k_BSJK.shape[1]
        if mask == "full":
            seen = masks.FullMask(shape)
        elif window is None:
            seen = masks.CausalMask(shape)
        else:
            seen = masks.LocalMask(shape, (window - 1, 0), 0)
        return _library().make_splash_mha(
            masks.MultiHeadMask([seen] * q_BTHK.shape[2]),
            block_sizes=_block_sizes(*shape),
            attn_logits_soft_cap=self.softcap,
            save_residuals=True,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )


def _block_sizes(queries: int, keys: int) -> BlockSizes:
    """The blocks in which a kernel computes, for numbers of queries and keys on a device."""
    q, k = _largest_block(queries), _largest_block(keys)
    # The gradient of q has its own kernel. A fused kernel writes one for each block of keys: on v5e, the sum of four of
    # them takes longer than the two products that the kernel of its own computes again.
    return _library().BlockSizes(block_q=q, block_kv=k, block_q_dkv=q, block_kv_dkv=k, block_q_dq=q, block_kv_dq=k)


def _mask_name(mask: Mask, window: int | None, queries: int, keys: int) -> str:
    """A scope that says how many blocks a kernel computes, of how many: `estimate.kernels` reads it."""
    q, k = _largest_block(queries), _largest_block(keys)
    blocks = [(row, column) for row in range(0, queries, q) for column in range(0, keys, k)]
    seen = [
        (row, column)
        for row, column in blocks
        # the first key is seen by the last query; the last key is in the window of the first query
        if mask == "full" or (column < row + q and (window is None or column + k > row - window + 1))
    ]
    return f"mask_{len(seen)}_of_{len(blocks)}"


def _largest_block(length: int) -> int:
    return next(size for size in range(_BLOCK, 0, -_LANES) if length % size == 0)


def _ids(segments: Segments) -> SegmentIds | None:
    return None if segments is None else _library().SegmentIds(*segments)


def _heads_first(x_BTHK: jax.Array) -> jax.Array:
    return rearrange(x_BTHK, "b t h k -> b h t k")


def _library() -> ModuleType:
    # imported where it is used: Pallas takes half a second, which a run on a CPU does not need
    return importlib.import_module(_MODULE)


def _masks() -> ModuleType:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

    return splash_attention_mask


KERNEL = AttentionKernel(refuses, unsupported, attend)
