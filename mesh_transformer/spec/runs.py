"""Runs of layers: a period of layers that repeats. Parameters are stacked by run and module."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class Run(NamedTuple, Generic[K]):
    """Consecutive layers: those of `period` one after the other, `repeats` times. A layer is given by its kind."""

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


def runs_of(kinds: Sequence[K]) -> tuple[Run[K], ...]:
    """The layers in few runs, given the kind of each. A run takes as many layers as it can; its period is short."""
    # numbers are compared faster than kinds
    number = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    left, runs = tuple(number[kind] for kind in kinds), []
    named = list(number)
    while left:
        periods = [left[:size] for size in range(1, len(left) // 2 + 1)]
        repeated = [(period, count) for period in periods if (count := _repeats(left, period)) > 1]
        period, repeats = max(repeated, key=lambda one: len(one[0]) * one[1], default=(left[:1], 1))
        runs.append(Run(tuple(named[i] for i in period), repeats))
        left = left[len(period) * repeats :]
    return tuple(runs)


def _repeats(kinds: tuple[int, ...], period: tuple[int, ...]) -> int:
    """How many times `period` stands one after the other at the beginning of `kinds`."""
    return next(n for n in range(len(kinds) // len(period), 0, -1) if kinds[: n * len(period)] == period * n)


def starts(runs: Iterable[Run[K]]) -> list[int]:
    """The number of the first layer of each run, and the number of all layers."""
    found = [0]
    for run in runs:
        found.append(found[-1] + run.layers)
    return found


def shared_run(runs: Sequence[Run[K]], stages: int) -> int | None:
    """The number of the run whose repeats `stages` groups share out: the longest run that has a multiple of `stages`
    repeats, the last of equally long ones; None if there is none."""
    fit = [number for number, run in enumerate(runs) if run.repeats % stages == 0]
    return max(fit, key=lambda number: (runs[number].layers, number), default=None)


def neighbours(period: Sequence[K]) -> list[tuple[K, int]]:
    """The layers of a period as kinds, each with the number of its layers that follow each other."""
    found: list[tuple[K, int]] = []
    for kind in period:
        if found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1] + 1
        else:
            found.append((kind, 1))
    return found


def in_run(module: str, run: int, runs: int) -> str:
    """The name of a module's stack in a run, among the parameters of all `runs`: the module's own name, if there is one
    run."""
    return module if runs == 1 else f"{run}/{module}"
