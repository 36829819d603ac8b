"""A model as plain data, without jax: its decoder, and the tensors of other programs that hold its parameters."""

from mesh_transformer.spec.attention import (
    Attention,
    CacheEntry,
    LatentAttention,
    Matrix,
    Norm,
    Rotary,
    Scaling,
)
from mesh_transformer.spec.decoder import Activation, Decoder, Dense, Experts, Layer, Router
from mesh_transformer.spec.tensors import TRANSPOSED, Split, Tensor

__all__ = [
    "TRANSPOSED",
    "Activation",
    "Attention",
    "CacheEntry",
    "Decoder",
    "Dense",
    "Experts",
    "LatentAttention",
    "Layer",
    "Matrix",
    "Norm",
    "Rotary",
    "Router",
    "Scaling",
    "Split",
    "Tensor",
]
