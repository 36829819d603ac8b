"""Groups of layers: a period of layers that repeats. Parameters are stacked by group and module."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class LayerGroup(NamedTuple, Generic[K]):
    """Consecutive layers: the layers of `period` in order, `repeats` times. A layer is given by its kind."""

    period: tuple[K, ...]
    repeats: int

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.period) * self.repeats

    @property
    def kinds(self) -> tuple[K, ...]:
        """The kind of each layer."""
        return self.period * self.repeats


def layer_groups_of(kinds: Sequence[K]) -> tuple[LayerGroup[K], ...]:
    """Cut layers into few groups, given the kind of each layer. Each group takes as many layers as it can, with the
    shortest period."""
    # numbers are compared faster than kinds
    number = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    left, groups = tuple(number[kind] for kind in kinds), []
    named = list(number)
    while left:
        periods = [left[:size] for size in range(1, len(left) // 2 + 1)]
        candidates = [(period, count) for period in periods if (count := _repeats(left, period)) > 1]
        period, repeats = max(candidates, key=lambda candidate: len(candidate[0]) * candidate[1], default=(left[:1], 1))
        groups.append(LayerGroup(tuple(named[i] for i in period), repeats))
        left = left[len(period) * repeats :]
    return tuple(groups)


def _repeats(kinds: tuple[int, ...], period: tuple[int, ...]) -> int:
    """How many times `kinds` begins with `period`."""
    return next(n for n in range(len(kinds) // len(period), 0, -1) if kinds[: n * len(period)] == period * n)


def starts(groups: Iterable[LayerGroup[K]]) -> list[int]:
    """The number of the first layer of each group, and the number of all layers."""
    numbers = [0]
    for group in groups:
        numbers.append(numbers[-1] + group.layers)
    return numbers


def pipelined_group(groups: Sequence[LayerGroup[K]], virtual_stages: int) -> int | None:
    """The number of the group that a pipeline splits over its virtual stages (pipeline stages x rounds): the longest
    group whose repeats are a multiple of `virtual_stages`, the last of equally long groups; None without such a
    group."""
    fit = [number for number, group in enumerate(groups) if group.repeats % virtual_stages == 0]
    return max(fit, key=lambda number: (groups[number].layers, number), default=None)


def neighbours(period: Sequence[K]) -> list[tuple[K, int]]:
    """Join equal neighbours of a period: each kind with the number of its layers that follow each other."""
    joined: list[tuple[K, int]] = []
    for kind in period:
        if joined and joined[-1][0] == kind:
            joined[-1] = kind, joined[-1][1] + 1
        else:
            joined.append((kind, 1))
    return joined


def in_group(module: str, group: int, groups: int) -> str:
    """The name of a module's stack in a group of layers: the module's name, after the number of the group if there are
    several."""
    return module if groups == 1 else f"{group}/{module}"
