"""A random order of 0 .. n - 1 that is computed one index at a time.

The order is part of a stored data position, so that no version of a library may change it: this file has all of it.
"""

import hashlib
import math
import struct

_ROUNDS = 6
_64_BITS = (1 << 64) - 1


class Permutation:
    """A bijection of 0 .. size - 1 that a seed chooses. It keeps a few numbers, whatever the size.

    It is a Feistel network on pairs of digits (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, the
    generalized Feistel): an index is a pair of `left` and `right`, and each round adds a function of one of them to the
    other. There are at least `size` pairs. A pair that stands for no index goes through the network again until one
    does ("cycle walking"), which takes 1 + 1 / sqrt(size) passes in the mean.

    Args:
        seed: any text.
    """

    def __init__(self, size: int, seed: str):
        self.size = size
        # left < _lefts, right < _rights
        self._rights = math.isqrt(size - 1) + 1
        self._lefts = -(-size // self._rights)
        digest = hashlib.blake2b(seed.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = struct.unpack(f"<{_ROUNDS}Q", digest)

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is not in 0..{self.size - 1}")
        index = self._once(index)
        while index >= self.size:
            index = self._once(index)
        return index

    def _once(self, index: int) -> int:
        left, right = divmod(index, self._rights)
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _mixed(left + key)) % self._rights
            else:
                left = (left + _mixed(right + key)) % self._lefts
        return left * self._rights + right


def _mixed(number: int) -> int:
    """A number of 64 bits, each of which depends on all of `number`.

    Source: the last function of splitmix64 (Steele, Lea and Flood, 2014).
    """
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _64_BITS
    return number ^ number >> 31
