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
from mesh_transformer.spec.attention import (
    AttentionSpec,
    FromLatentsSpec,
    JointLatentAttentionSpec,
    LatentAttentionSpec,
)
from mesh_transformer.spec.decoder import T5_BUCKETS, Decoder
from mesh_transformer.spec.feed_forward import Activation, Dense, ExpertsSpec, RouterSpec
from mesh_transformer.spec.layer import (
    Branch,
    Layer,
    Reading,
    Sublayer,
    parallel,
    parallel_norms,
    post,
    sandwich,
    sequential,
)
from mesh_transformer.spec.layer_groups import (
    LayerGroup,
    in_group,
    layer_groups_of,
    neighbours,
    pipelined_group,
    starts,
)
from mesh_transformer.spec.lora import Adapter, Lora
from mesh_transformer.spec.mechanism import AttentionMixer, CacheEntry, Mechanism, PerLayer, PositionEncoding
from mesh_transformer.spec.norm import NormSpec
from mesh_transformer.spec.rotary import Rotary, Scaling
from mesh_transformer.spec.tensors import TRANSPOSED, Split, Tensor, by_stack

__all__ = [
    "T5_BUCKETS",
    "TRANSPOSED",
    "Activation",
    "Adapter",
    "Alibi",
    "Array",
    "Arrays",
    "AttentionMixer",
    "AttentionSpec",
    "Axes",
    "AxesTree",
    "Branch",
    "CacheEntry",
    "Decoder",
    "Dense",
    "ExpertsSpec",
    "FromLatentsSpec",
    "JointLatentAttentionSpec",
    "LatentAttentionSpec",
    "Layer",
    "Mechanism",
    "NormSpec",
    "PerLayer",
    "Sublayer",
    "Reading",
    "PositionEncoding",
    "Rotary",
    "RouterSpec",
    "LayerGroup",
    "Lora",
    "Scaling",
    "Split",
    "Tensor",
    "below",
    "by_stack",
    "in_group",
    "inside",
    "linear",
    "matrix",
    "neighbours",
    "parallel",
    "parallel_norms",
    "post",
    "layer_groups_of",
    "sandwich",
    "sequential",
    "pipelined_group",
    "starts",
    "with_outputs",
]
