"""ALiBi as plain data."""

from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(frozen=True)
class Alibi:
    """Attention with linear biases (Press et al. 2021, arXiv:2108.12409): a head adds its slope times the position of a
    key to the scaled product of a query with it.

    The position is two more dims of each key, of one digit each, and the slope two more dims of each query.
    """

    # dims that the encoding adds to each head of queries and keys
    added_dims: ClassVar[int] = 2

    @property
    def kind(self) -> Self:
        """The encoding without its numbers: it has none."""
        return self
