"""The group `compute`: how a model is computed. Nothing here changes what it computes, but for rounding."""

from typing import Literal

from mesh_transformer.fields import Group, Layers, Mebibytes


class ComputeConfig(Group):
    """Precision, memory and compile time of the computation."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the arithmetic; auto: bfloat16 on TPU and GPU, float32 on CPU"""
    remat: Literal["auto", "none", "full", "save_attn", "save_matmuls"] = "auto"
    """what the backward pass recomputes: none; full (everything but the block's input); save_attn (keeps the attention
    output); save_matmuls (keeps attention output and feed-forward hidden); auto: none on CPU, full elsewhere"""
    scan_unroll: Layers = 1
    """layers unrolled per scan iteration; more runs faster and compiles slower"""
    logits_mib: Literal["auto"] | Mebibytes = "auto"
    """float32 logits that a device holds at a time in training and validation, in MiB: the head and the loss run over
    the positions in that many parts; auto: 128 on CPU, 1024 elsewhere"""
