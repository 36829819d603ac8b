"""Attention by cuDNN's flash kernels, for GPUs of compute capability 8.0 and later. They never write logits to memory.

Shapes: as in `ops.attend.causal`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mesh_transformer.ops.attend.kernel import (
    AttentionKernel,
    Call,
    Case,
    changed_arguments,
    on_each_device,
    split_heads,
)
from mesh_transformer.parallel.sharding import Partition, Tree

# compute capability: the largest dims of a head
_HEAD_DIMS = {8: 128, 9: 256}
_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
# the arguments of JAX's primitives: arrays, further arrays of the backward pass, and options
_ARRAYS = (
    *("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"),
    *("page_table_k", "page_table_v"),
)
_SAVED = ("activation", "fwd_output", "grad_output")
_OPTIONS = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
# options since JAX 0.12, for a function that changes the logits
_SCORE = ("score_mod_name", "score_mod_jaxpr")


def refuses(case: Case) -> str | None:
    """See `AttentionKernel`. Heads as in `check_is_flash_attention` of JAX."""
    major = case.target.generation.partition(".")[0]
    newest = int(major) if case.target.platform == "gpu" and major.isdecimal() else 0
    if newest < min(_HEAD_DIMS):
        device = f"of {case.target.generation or 'unknown'}" if case.target.platform == "gpu" else "no GPU"
        return f"needs a GPU of compute capability {min(_HEAD_DIMS)}.0 or later, and the device is {device}"
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
        return f"cannot compute the blocks of mesh.context_mode {case.ring}"
    return None


def unsupported() -> str | None:
    """See `AttentionKernel`."""
    forward, backward = _ARRAYS, (*_ARRAYS, *_SAVED)
    return changed_arguments(
        *(_MODULE, _lowering("fwd")),
        ("ctx", *forward, *_OPTIONS, "is_training"),
        ("ctx", *forward, "score_mod_args", *_OPTIONS, *_SCORE, "is_training"),
    ) or changed_arguments(
        *(_MODULE, _lowering("bwd")),
        ("ctx", *backward, *_OPTIONS),
        ("ctx", *backward, "score_mod_args", *_OPTIONS, *_SCORE),
    )


def _lowering(phase: str) -> str:
    """The function that lowers the primitive. Its signature names every argument of the primitive."""
    return f"_dot_product_attention_{phase}_cuda_lowering"


@dataclasses.dataclass(frozen=True, eq=False)
class _CudnnPlan:
    """The static arguments of an attention."""

    partition: Partition
    scale: float
    window: int | None

    def map(self, function: Callable[..., Tree], inputs: int, outputs: Sequence[P]) -> Callable[..., Tree]:
        """`function` of the plan, and of the arrays of one device; the first `inputs` are (B, T, H, K)."""
        heads = split_heads(self.partition)
        specs = [heads] * inputs + ([self.normalizer] if inputs > 3 else [])
        return on_each_device(self.partition, functools.partial(function, self), tuple(specs), tuple(outputs))

    @property
    def normalizer(self) -> P:
        """The split of (B, H, T)."""
        heads = split_heads(self.partition)
        return P(heads[0], heads[2])

    def bind(self, phase: str, arrays: Sequence[jax.Array], **more: object) -> tuple[jax.Array, ...]:
        """The results of the primitive of a phase, fwd or bwd, for q, k, v and the saved arrays.

        `jax.nn.dot_product_attention` binds the same primitives. But it asks an attached GPU what it can compute, and a
        program may be compiled for another. The policies of compute.remat could not name the arrays that it saves.
        """
        none = jnp.zeros(0, arrays[0].dtype)
        known = inspect.signature(getattr(_library(), _lowering(phase))).parameters
        more |= {name: None for name in _SCORE if name in known}
        results = getattr(_library(), f"_dot_product_attention_{phase}_p").bind(
            *arrays[:3],
            # no bias, lengths, offsets and pages
            *[none] * 7,
            *arrays[3:],
            scale=self.scale,
            seed=0,
            dropout_rate=0.0,
            variadic_args=(False, False),
            mask_type=_library().MaskType.CAUSAL,
            layout=_library().AttentionLayout.BTNH.value,
            sliding_window_length=self.window,
            **more,
        )
        return tuple(results)


def attend(partition: Partition, call: Call) -> jax.Array:
    """See `AttentionKernel`. The policies of compute.remat refer to the saved arrays by the name "attn_out"."""
    (window,) = call.windows
    return _attend(_CudnnPlan(partition, call.scale, window), call.q_BTHK, call.k_BTJK, call.v_BTJV)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _CudnnPlan, q_BTHK: jax.Array, k_BTJK: jax.Array, v_BTJK: jax.Array) -> jax.Array:
    return _forward(plan, q_BTHK, k_BTJK, v_BTJK)[0]


def _forward(plan: _CudnnPlan, *given: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def of_device(plan: _CudnnPlan, *given: jax.Array) -> tuple[jax.Array, ...]:
        return plan.bind("fwd", given, is_training=True)

    run = plan.map(of_device, 3, (split_heads(plan.partition), plan.normalizer))
    mixed, log_z = (checkpoint_name(x, "attn_out") for x in run(*given))
    return mixed, (*given, mixed, log_z)


def _backward(plan: _CudnnPlan, saved: tuple[jax.Array, ...], dy_BTHK: jax.Array) -> tuple[jax.Array, ...]:
    def of_device(plan: _CudnnPlan, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, mixed, dy, log_z = arrays
        return plan.bind("bwd", (q, k, v, log_z, mixed, dy))

    *arrays, log_z = saved
    dq, dk, dv = plan.map(of_device, 5, [split_heads(plan.partition)] * 3)(*arrays, dy_BTHK, log_z)
    return dq, dk, dv


_attend.defvjp(_forward, _backward)


def _library() -> ModuleType:
    return importlib.import_module(_MODULE)


KERNEL = AttentionKernel(refuses, unsupported, attend)
