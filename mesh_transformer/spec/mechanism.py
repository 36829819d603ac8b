"""What every mechanism of a layer says about itself: its arrays, what it keeps of each position, and its numbers."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from mesh_transformer.fields import Size
from mesh_transformer.spec.alibi import Alibi
from mesh_transformer.spec.arrays import Arrays
from mesh_transformer.spec.rotary import Rotary

PositionEncoding = Rotary | Alibi
"""How attention knows the positions of queries and keys: the table of their computations is in ops/positions.py."""


class Numbers(NamedTuple):
    """The numbers of one layer: its window, and its position encoding."""

    window: int | None
    positions: PositionEncoding | None


class CacheEntry(NamedTuple):
    """One array that the cache holds for a position: its shape (heads, width), and the name of its first dimension."""

    name: str | None
    heads: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A map of the residual stream, whose output a layer adds to the stream. models/block.py has the table of the
    Haiku modules that compute it.

    A subclass is a frozen dataclass. `name` begins the names of its parameters: two mechanisms of one layer need two
    names.
    """

    name: str

    @property
    def out_bias(self) -> bool:
        """Whether a bias is added to the output: the parameter `{name}_out/b`."""
        return False

    @property
    def sizes(self) -> tuple[tuple[str, Size], ...]:
        """The sizes of named dimensions that devices may split, with the fields that set them."""
        return ()

    @property
    def kind(self) -> Self:
        """The mechanism without its numbers. Layers of one kind have parameters of the same shapes."""
        return self

    def arrays(self, width: int) -> Arrays:
        """All parameters but the bias of the output, in a residual stream of this width."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Attends(Mechanism):
    """A mechanism in which a position reads earlier ones, with `heads` heads of queries. A layer has one.

    `positions` encodes the positions of queries and keys; None: nothing does. A query sees the last `window` keys, up
    to its own; None: all. `scale` multiplies the products of queries and keys; None: 1 / sqrt(dims of a head).
    """

    name: str = "attention"
    heads: int
    positions: PositionEncoding | None
    scale: float | None = None
    window: int | None = None

    @property
    def sizes(self) -> tuple[tuple[str, Size], ...]:
        """See `Mechanism`."""
        return (("heads", Size("model.n_heads", self.heads)),)

    @property
    def keys_and_values(self) -> tuple[CacheEntry, CacheEntry]:
        """What attention multiplies of each position."""
        raise NotImplementedError

    @property
    def cache_entries(self) -> tuple[CacheEntry, ...]:
        """What the cache holds for each position."""
        return self.keys_and_values

    @property
    def numbers(self) -> Numbers:
        """The numbers in which layers of one kind may differ."""
        return Numbers(self.window, self.positions)

    @property
    def kind(self) -> Self:
        """See `Mechanism`."""
        return replace(self, window=None, positions=self.positions and self.positions.kind)

    @property
    def products_per_key(self) -> int:
        """Multiplications of a token with each position that it sees, in all heads: queries with keys, and the softmax
        with values."""
        key, value = self.keys_and_values
        return self.heads * (key.width + value.width)
