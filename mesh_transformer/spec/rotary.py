"""Rotary position encoding as plain data."""

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How the frequencies of rotary encoding are lowered for contexts that are longer than `original_seq`.

    linear: all by `factor` (Chen et al. 2023, arXiv:2306.15595). llama3: only frequencies with fewer than
    `low_freq_factor` turns in `original_seq` positions; frequencies with more than `high_freq_factor` turns stay, with
    a ramp in between (Llama 3.1). yarn: as llama3, with a ramp over the dims from `beta_slow` to `beta_fast` turns, and
    sines and cosines are multiplied by `attention_factor` (Peng et al. 2023, arXiv:2309.00071). longrope: each
    frequency by its own number in `factors`, with `attention_factor` too (Ding et al. 2024, arXiv:2402.13753).
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    original_seq: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # the ends of yarn's ramp are whole numbers of dims
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position encoding (Su et al. 2021, arXiv:2104.09864) of the first `dims` of each head.

    pairs: dims (0, 1), (2, 3) ... are rotated together (GPT-J); halves: dims i and i + dims / 2 (GPT-NeoX). The product
    position * frequency is computed in `precision`: float32 in transformers, float64 in the original GPT-J. With an odd
    number of dims, one dim more is rotated. Without a base all angles are 0: nothing is rotated. The first token has
    position `first`.
    """

    # dims that the encoding adds to each head of queries and keys
    added_dims: ClassVar[int] = 0

    dims: int
    style: Literal["pairs", "halves"]
    base: float | None = 10000.0
    precision: Literal["float32", "float64"] = "float32"
    scaling: Scaling | None = None
    first: int = 0

    @property
    def kind(self) -> "Rotary":
        """The encoding without its numbers, base, scaling and first position: angles of one kind are arrays of one
        shape."""
        return Rotary(dims=self.dims, style=self.style, precision=self.precision)
