"""Our answers to the exercises of chapter 9."""

import math


def group(device: int, axis: str, sizes: dict[str, int]) -> list[int]:
    """The stride of an axis is the product of the sizes of the axes after it."""
    after = list(sizes).index(axis) + 1
    stride = math.prod(list(sizes.values())[after:])
    first = device - device // stride % sizes[axis] * stride
    return [first + place * stride for place in range(sizes[axis])]


def gradient_sums(parameter: set[str], tokens: set[str]) -> tuple[set[str], set[str]]:
    """Each axis that splits the tokens needs a sum. Where the array is split too, a part of the sum is enough."""
    return tokens - parameter, tokens & parameter


def microbatches(stages: int, compute: float, gather: float) -> float:
    """(M + p - 1) (c / M + g) = c + (p - 1) g + M g + (p - 1) c / M. Its derivative by M is g - (p - 1) c / M^2."""
    return math.sqrt((stages - 1) * compute / gather)
