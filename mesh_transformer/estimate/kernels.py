"""The operations of kernels, which no compiler counts: read from the kernel's name and its arrays.

A kernel may declare its operations (`cost_estimate`), as the grouped products of megablox do. JAX's splash attention
declares none: it computes the blocks of its mask that are not empty, and these are counted.
"""

import re
from typing import NamedTuple

from mesh_transformer.estimate.hlo import HloArray, Instruction, Module

SHARES = {"v4": 0.55, "v5e": 0.55, "v5p": 0.5, "v6e": 0.35, "v7x": 0.35}
"""The share of the peak that a Pallas kernel is assumed to reach, by generation. The default is OTHER_SHARE."""
OTHER_SHARE = 0.5
_DECLARED = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_SPLASH = re.compile(r"\bsplash_m[hq]a_(fwd|dq|dkv)")
# (computed blocks, all blocks): a named scope around a kernel whose arrays do not hold the mask
_SEEN = re.compile(r"\bmask_(\d+)_of_(\d+)\b")


# cuDNN's attention: the shape of the logits (sequences, heads, queries, keys), and the window, 0 without one
_CUDNN = re.compile(r'"__cudnn\$fmhaSoftmax(Backward)?"')
_LOGITS = re.compile(r'"dimensions": ?\["(\d+)", ?"(\d+)", ?"(\d+)", ?"\d+"\]')
_WINDOW = re.compile(r'"sliding_window_length": ?(\d+)')


class _Products(NamedTuple):
    """Products of the size of the logits that one kernel computes."""

    # as wide as a head of queries, and as a head of values
    queries: int
    values: int


# Dao 2023, arXiv:2307.08691, section 2.3: logits, gradients of the softmax's weights, and of q, k, v
_PRODUCTS = {"fwd": _Products(1, 1), "dq": _Products(2, 1), "dkv": _Products(2, 2)}
# the backward pass in one kernel computes the gradient of q too
_FUSED = _Products(3, 2)


def kernel_flops(module: Module, instruction: Instruction) -> int:
    """Operations of a kernel on one device in one run: 2 for each pair of elements. 0 for an
    unknown kernel, and for an instruction that is no kernel."""
    if cudnn := _CUDNN.search(instruction.rest):
        return _cudnn_flops(module, instruction, backward=bool(cudnn[1]))
    if not is_kernel(instruction):
        return 0
    if declared := _DECLARED.search(instruction.rest):
        return int(declared[1])
    splash = _SPLASH.search(f"{instruction.name} {instruction.op_name}")
    return _splash_flops(module, instruction, splash[1]) if splash else 0


def is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction is a Pallas kernel for a TPU, or cuDNN's attention."""
    return instruction.opcode == "custom-call" and (
        '"tpu_custom_call"' in instruction.rest or _CUDNN.search(instruction.rest) is not None
    )


def _cudnn_flops(module: Module, instruction: Instruction, backward: bool) -> int:
    """Operations on the unmasked pairs of a causal mask: the block sizes of cuDNN are unknown."""
    logits, window = _LOGITS.search(instruction.rest), _WINDOW.search(instruction.rest)
    if logits is None:
        return 0
    sequences, heads, queries = map(int, logits.groups())
    seen = min(int(window[1]) if window else 0, queries) or queries
    width = next(module.operands(instruction)).arrays[0].shape[-1]
    return 2 * sequences * heads * width * (seen * (2 * queries - seen + 1) // 2) * (5 if backward else 2)


def _splash_flops(module: Module, instruction: Instruction, phase: str) -> int:
    arrays = [array for operand in module.operands(instruction) for array in operand.arrays[:1]]
    first = next(place for place, array in enumerate(arrays) if array.dtype.startswith(("bf", "f")))
    q, k, v = arrays[first : first + 3]
    queries, width = q.shape[-2:]
    gradients = [array for array in instruction.arrays if len(array.shape) >= len(q.shape)]
    products = _FUSED if phase == "dkv" and len(gradients) == len(("dq", "dk", "dv")) else _PRODUCTS[phase]
    # without these the mask has no empty block
    grid = next((array for array in arrays[:first] if array.shape), None)
    pairs = queries * k.shape[-2]
    if seen := _SEEN.search(instruction.op_name):
        pairs = pairs * int(seen[1]) // int(seen[2])
    elif grid is not None:
        pairs = _seen_pairs(instruction, phase, grid, queries, k.shape[-2])
    return 2 * q.size // width * pairs // queries * (products.queries * width + products.values * v.shape[-1])


def _seen_pairs(instruction: Instruction, phase: str, grid: HloArray, queries: int, keys: int) -> int:
    """Pairs of a query and a key in the blocks of a causal mask, with or without a window: a window makes the grid
    narrower than all blocks.

    Args:
        grid: (1 or heads, blocks of queries, blocks of keys), the mask that the kernel reads.
    """
    rows, columns = grid.shape[-2:]
    suffix = "" if phase == "fwd" else f"_{phase}"
    sizes = dict(re.findall(rf"block_(q|kv){suffix}\W+(\d+)", instruction.rest))
    size_q, size_k = int(sizes.get("q", queries // rows)), int(sizes.get("kv", keys // columns))
    if phase == "dkv":
        # a block of keys is seen by the queries from its own positions on
        blocks = sum(min(queries // size_q - key * size_k // size_q, rows) for key in range(keys // size_k))
    else:
        blocks = sum(min(-(-(query + 1) * size_q // size_k), columns) for query in range(queries // size_q))
    return blocks * size_q * size_k
