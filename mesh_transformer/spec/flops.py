"""The floating-point operations that training needs, from which the model FLOPs utilization (MFU) is computed.

Chowdhery et al. 2022, arXiv:2204.02311, appendix B: a token takes 6 operations for each element of a matrix (forward
and backward pass; 4 if it is frozen and has no gradient) and 6 L T H (K + V) for the products of queries with keys of K
dims and of the softmax with values of V dims, which are not halved for causality. What the backward pass recomputes
does not count. A layer with a window counts the keys in the window. Of routed experts, only the chosen ones count.
"""

from mesh_transformer.spec.decoder import Decoder


def flops_per_token(decoder: Decoder, seq: int) -> int:
    """Operations that one token of a training sequence of `seq` tokens needs, forward and backward."""
    attentions = [layer.attention for layer in decoder.layers]
    attended = sum(min(attention.window or seq, seq) * attention.products_per_key for attention in attentions)
    adapters = sum(array.used for array in decoder.arrays().values() if array.adapter)
    matrices = 4 * matrix_elements(decoder) + 2 * adapters if adapters else 6 * matrix_elements(decoder)
    return matrices + 6 * attended


def matrix_elements(decoder: Decoder) -> int:
    """Elements of the matrices by which each token is multiplied, in the layers and in the head, without padding."""
    layers = sum(array.used for path, array in decoder.arrays().items() if path.startswith("blocks/"))
    return layers + decoder.d_model * decoder.n_vocab
