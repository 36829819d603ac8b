"""The floating-point operations that training needs, from which the model FLOPs utilization (MFU) is computed.

Chowdhery et al. 2022, arXiv:2204.02311, appendix B: a token takes 6 operations for each element of a matrix (forward
and backward pass) and 6 L T H (K + V) for the products of queries with keys of K dims and of the softmax with values of
V dims, which are not halved for causality. What the backward pass recomputes does not count. A layer with a window counts
the keys in the window. Of routed experts, those that a token chooses count.
"""

import math

from mesh_transformer.spec.decoder import Decoder, Dense, Experts


def flops_per_token(decoder: Decoder, seq: int) -> int:
    """Operations that one token of a training sequence of `seq` tokens needs, forward and backward."""
    attended = sum(
        min(a.window or seq, seq) * a.heads * (a.head_dim + a.v_dims)
        for a in (layer.attention for layer in decoder.layers)
    )
    return 6 * matrix_elements(decoder) + 6 * attended


def matrix_elements(decoder: Decoder) -> int:
    """Elements of the matrices by which each token is multiplied: those of the layers and the head, without padding."""
    width = decoder.d_model
    attention = sum(math.prod(one.shape) for layer in decoder.layers for one in layer.attention.matrices(width))
    return attention + sum(_feed_forward(layer.ff, width) for layer in decoder.layers) + width * decoder.n_vocab


def _feed_forward(ff: Dense | Experts, width: int) -> int:
    if isinstance(ff, Dense):
        return (3 if ff.gated else 2) * ff.d_ff * width
    routed, router = 3 * ff.router.chosen * ff.d_ff * width, (ff.count + ff.shared_gate) * width
    return routed + router + (_feed_forward(ff.shared, width) if ff.shared else 0)
