"""Runs of layers: a period of layers that repeats. Parameters are stacked by run and module."""

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


def runs_of(kinds: Sequence[K]) -> tuple[LayerGroup[K], ...]:
    """Cut layers into few runs, given the kind of each layer. Each run takes as many layers as it can, with the
    shortest period."""
    # numbers are compared faster than kinds
    number = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    left, runs = tuple(number[kind] for kind in kinds), []
    named = list(number)
    while left:
        periods = [left[:size] for size in range(1, len(left) // 2 + 1)]
        candidates = [(period, count) for period in periods if (count := _repeats(left, period)) > 1]
        period, repeats = max(candidates, key=lambda candidate: len(candidate[0]) * candidate[1], default=(left[:1], 1))
        runs.append(LayerGroup(tuple(named[i] for i in period), repeats))
        left = left[len(period) * repeats :]
    return tuple(runs)


def _repeats(kinds: tuple[int, ...], period: tuple[int, ...]) -> int:
    """How many times `kinds` begins with `period`."""
    return next(n for n in range(len(kinds) // len(period), 0, -1) if kinds[: n * len(period)] == period * n)


def starts(runs: Iterable[LayerGroup[K]]) -> list[int]:
    """The number of the first layer of each run, and the number of all layers."""
    numbers = [0]
    for run in runs:
        numbers.append(numbers[-1] + run.layers)
    return numbers


def shared_run(runs: Sequence[LayerGroup[K]], stages: int) -> int | None:
    """The number of the run whose repeats are split into `stages` groups: the longest run with a multiple of `stages`
    repeats, the last of equally long runs; None without such a run."""
    fit = [number for number, run in enumerate(runs) if run.repeats % stages == 0]
    return max(fit, key=lambda number: (runs[number].layers, number), default=None)


def neighbours(period: Sequence[K]) -> list[tuple[K, int]]:
    """Group equal neighbours of a period: each kind with the number of its layers that follow each other."""
    groups: list[tuple[K, int]] = []
    for kind in period:
        if groups and groups[-1][0] == kind:
            groups[-1] = kind, groups[-1][1] + 1
        else:
            groups.append((kind, 1))
    return groups


def in_run(module: str, run: int, runs: int) -> str:
    """The name of a module's stack in a run: the module's name, after the number of the run if there are several."""
    return module if runs == 1 else f"{run}/{module}"
