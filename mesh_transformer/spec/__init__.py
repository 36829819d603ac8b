"""A model as plain data, without jax: its decoder, and the tensors of other programs that hold its parameters."""

from mesh_transformer.spec.alibi import Alibi
from mesh_transformer.spec.arrays import (
    Array,
    Arrays,
    Axes,
    AxesTree,
    below,
    inside,
    linear,
    matrix,
    with_outputs,
)
from mesh_transformer.spec.attention import Attention, FromLatents, JointLatentAttention, LatentAttention
from mesh_transformer.spec.decoder import T5_BUCKETS, Decoder
from mesh_transformer.spec.feed_forward import Activation, Dense, Experts, Router
from mesh_transformer.spec.layer import (
    Branch,
    Layer,
    Part,
    Reading,
    parallel,
    parallel_norms,
    post,
    sandwich,
    sequential,
)
from mesh_transformer.spec.mechanism import Attends, CacheEntry, Mechanism, Numbers, PositionEncoding
from mesh_transformer.spec.norm import Norm
from mesh_transformer.spec.rotary import Rotary, Scaling
from mesh_transformer.spec.runs import Run, in_run, neighbours, runs_of, shared_run, starts
from mesh_transformer.spec.tensors import TRANSPOSED, Split, Tensor, by_stack

__all__ = [
    "T5_BUCKETS",
    "TRANSPOSED",
    "Activation",
    "Alibi",
    "Array",
    "Arrays",
    "Attends",
    "Attention",
    "Axes",
    "AxesTree",
    "Branch",
    "CacheEntry",
    "Decoder",
    "Dense",
    "Experts",
    "FromLatents",
    "JointLatentAttention",
    "LatentAttention",
    "Layer",
    "Mechanism",
    "Norm",
    "Numbers",
    "Part",
    "Reading",
    "PositionEncoding",
    "Rotary",
    "Router",
    "Run",
    "Scaling",
    "Split",
    "Tensor",
    "below",
    "by_stack",
    "in_run",
    "inside",
    "linear",
    "matrix",
    "neighbours",
    "parallel",
    "parallel_norms",
    "post",
    "runs_of",
    "sandwich",
    "sequential",
    "shared_run",
    "starts",
    "with_outputs",
]
