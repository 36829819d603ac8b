"""Exercises of chapter 9, n dimensions. Fill in the functions, then run: python scripts/guide.py check 9"""


def group(device: int, axis: str, sizes: dict[str, int]) -> list[int]:
    """Which devices communicate along an axis?

    `sizes` has the size of each mesh axis, outermost first, such as {"pp": 2, "fsdp": 8, "tp": 2}. Devices are numbered
    from 0 in this order: the last axis changes fastest. A collective over `axis` runs between devices that differ in
    their index on this axis only. Return the numbers of the devices in the group of `device`, itself included, in
    ascending order. A compiled program lists these groups as `replica_groups`.

    Hint: how far apart are the numbers of two neighbours on this axis?
    """
    raise NotImplementedError


def gradient_sums(parameter: set[str], tokens: set[str]) -> tuple[set[str], set[str]]:
    """Over which axes must the gradient of an array be summed?

    `parameter` has the mesh axes that split the array, `tokens` those that split the tokens by which it is multiplied.
    An axis in both is FSDP: its devices gather the array before they use it, and each has other tokens. (Experts see
    the tokens of all devices of ep, so ep is not in `tokens` for them.) A device has computed the gradient of its own
    tokens. Return two sets of axes: over the first the gradient is summed, and all devices get the whole sum
    (all-reduce); over the second each device gets its part of the sum (reduce-scatter).

    Think of three examples. Columns of a matrix are split by tp and its rows by fsdp, the tokens by dp and fsdp. The
    scale of a norm is split by fsdp, with the same tokens. The same scale, where tp splits the positions of the tokens.
    """
    raise NotImplementedError


def microbatches(stages: int, compute: float, gather: float) -> float:
    """How many microbatches should a pipeline with FSDP have?

    A step has M + p - 1 ticks, where p is `stages`. In each tick a chip computes a microbatch, which takes
    `compute` / M seconds, and gathers the weights of its layers, which takes `gather` seconds, however small the
    microbatch is. More microbatches make the bubble smaller, and gather more often. Return the M, a real number, at
    which the step is shortest. `stages` is at least 2.

    Hint: write the time of the step as a sum of terms without M, with M, and with 1 / M.
    """
    raise NotImplementedError
