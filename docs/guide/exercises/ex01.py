"""Exercises of chapter 1: fill in the functions, then run `python scripts/guide.py check 1`.

B sequences, T positions, H heads of queries, J heads of keys and values, K numbers of a head, V vocabulary entries.
"""


def rotate_halves(x_BTHK, positions_T, base):
    """Rotary encoding that pairs number i of a head with number i + K / 2, and not with its neighbour.

    Pair i turns by position * base^(-2i / K). x is float32 (B, T, H, K), `positions_T` are integers and need not begin
    at 0. Returns an array of x's shape. Which two lines of the chapter's `rotate` change?
    """
    raise NotImplementedError


def grouped_attention(q_BTHK, k_BTJK, v_BTJK):
    """Causal attention in which H / J heads of queries share one head of keys and values (arXiv:2305.13245).

    Heads 0 .. H / J - 1 of the queries use head 0 of keys and values, the next H / J heads use head 1, and so on.
    Returns (B, T, H, K). Do not copy the keys H / J times: give the queries one more dimension.
    """
    raise NotImplementedError


def bits_per_byte(logits_BTV, targets_BT, bytes_V):
    """The loss of a model with longer tokens, in bits per byte of the text.

    `bytes_V` has the number of bytes of each token of the vocabulary. Returns a scalar. A model with longer tokens has
    a higher loss for each token: why is it wrong to divide the loss of each token by its own bytes, and to take the
    mean of these?
    """
    raise NotImplementedError


def layer_intensity(D, F, tokens):
    """The forward pass of the matrices of one layer of the chapter, for so many tokens, in float32.

    Returns (FLOPs, bytes). The matrices are those of q, k, v, o, up and down. Count for each product the bytes of its
    matrix, of its input and of its output, once. q, k and v are one product: they read their input together once.
    With D = 64 and F = 256, is the step of the chapter left or right of the corner of your machine? And with
    D = 4096 and F = 16384?
    """
    raise NotImplementedError
