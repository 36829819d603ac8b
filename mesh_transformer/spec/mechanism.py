"""The interface of the mechanisms of a layer: their arrays, their entries in the cache, and their numbers."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from mesh_transformer.fields import Size
from mesh_transformer.spec.alibi import Alibi
from mesh_transformer.spec.arrays import Arrays
from mesh_transformer.spec.rotary import Rotary

PositionEncoding = Rotary | Alibi
"""The encoding of the positions of queries and keys. ops/positions.py has the table of the computations."""


class PerLayer(NamedTuple):
    """The settings that may differ between layers that share one compiled body."""

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
        """The parameters without the bias of the output, in a residual stream of this width."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AttentionMixer(Mechanism):
    """A mechanism in which a position reads earlier ones, with `heads` heads of queries. A layer has one.

    `positions` is the encoding of the positions of queries and keys, if there is one. A query sees the last `window`
    keys, up to its own, or all keys up to its own without a window. `scale` multiplies the products of queries and
    keys, by default 1 / sqrt(dims of a head).
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
        """The key and the value of each position, as attention multiplies them."""
        raise NotImplementedError

    @property
    def cache_entries(self) -> tuple[CacheEntry, ...]:
        """The arrays that the cache holds for each position."""
        return self.keys_and_values

    @property
    def numbers(self) -> PerLayer:
        """The numbers that may differ between layers of one kind."""
        return PerLayer(self.window, self.positions)

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
