"""Which record of which source each step of a run takes. It reads no file.

The source of a draw is the one that lags most behind its weight, and its records come in the order of a permutation for
each pass. No random number is drawn, so a position is a count for each source. It is the same on every host.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from mesh_transformer.config.mixture import TrainSource
from mesh_transformer.data.batches.permutation import Permutation
from mesh_transformer.data.records.stamps import or_restart
from mesh_transformer.errors import UserError

VERSION = 2


class Draw(NamedTuple):
    """A record of a source.

    Args:
        source: the place of its name among the sorted names.
        number: how many records of the source come before it, in all passes.
    """

    source: int
    number: int


@dataclass
class SourceProgress:
    """Records drawn from a source, in total and at the last change of the weights.

    Args:
        weight: its weight in the last step; 0 if it had no more records.
        drawn: records drawn in all passes.
        base: `drawn` at the last change of the weights.
    """

    weight: float = 0.0
    drawn: int = 0
    base: int = 0


class Mixture:
    """The draws of a run, step by step.

    A source with weight w lags by w / (sum of the weights) x draws - (draws from it), both since the weights last
    changed. A draw goes to the source with the largest lag, counting this draw; of equal ones, to the first by name.

    Args:
        sources: by name.
        sizes: the number of records of each source.
        seed: of the permutations. None: each pass is in the order of the files.
        draws: of a step.
    """

    def __init__(self, sources: Mapping[str, TrainSource], sizes: Mapping[str, int], seed: int | None, draws: int):
        self.names = sorted(sources)
        self._sources, self._sizes, self._seed, self._draws = sources, sizes, seed, draws
        self.order = "the order of the files" if seed is None else f"whole, seed {seed}"
        # the last step
        self.step = 0
        # why the data has ended
        self.end = ""
        self._progress = {name: SourceProgress() for name in self.names}
        # whole numbers in the proportions of the weights
        self._shares: dict[str, int] = {}
        # the last pass of each source that `record` was asked for, and its order
        self._permutations: dict[int, tuple[int, Permutation]] = {}

    def next_step(self) -> list[Draw] | None:
        """The draws of the next step. None, and no change, if the data ends before the step is full: `end` says why."""
        before = {name: replace(progress) for name, progress in self._progress.items()}
        self._set_weights({name: self._weight_at(name, self.step + 1) for name in self.names})
        draws = []
        for _ in range(self._draws):
            draw = self._draw()
            if draw is None:
                self._progress = before
                return None
            draws.append(draw)
        self.step += 1
        return draws

    def record(self, draw: Draw) -> int:
        """The number of a drawn record in its source."""
        name = self.names[draw.source]
        epoch, place = divmod(draw.number, self._sizes[name])
        if self._seed is None:
            return place
        if self._permutations.get(draw.source, (-1,))[0] != epoch:
            order = Permutation(self._sizes[name], f"{self._seed} {epoch} {name}")
            self._permutations[draw.source] = (epoch, order)
        return self._permutations[draw.source][1][place]

    def position(self) -> dict[str, Any]:
        """The position after the last step: JSON values."""
        sources = {name: {**asdict(self._progress[name]), "records": self._sizes[name]} for name in self.names}
        return {"version": VERSION, "order": self.order, "step": self.step, "sources": sources}

    def go_to(self, position: Any) -> None:
        """Continue at a stored position. The weights may have changed since.

        Raises:
            UserError: it cannot be read, or is of other sources or another order.
        """
        step, order, progress = _checked(position)
        if order not in (None, self.order):
            raise UserError(
                f"the stored data position has the order '{order}', this run has the order '{self.order}': set "
                f"data.shuffle and data.seed to their former values, {or_restart()}"
            )
        if progress and sorted(progress) != self.names:
            raise UserError(
                f"the stored data position is of the sources {', '.join(sorted(progress))}, and data.train_set has "
                f"{', '.join(self.names)}: restore the former sources (a weight may become 0), {or_restart()}"
            )
        self.step = step
        self._progress = {name: progress.get(name, SourceProgress()) for name in self.names}

    def _weight_at(self, name: str, step: int) -> float:
        source = self._sources[name]
        leaves = source.after_epochs == "others" and self._is_finished(name)
        return 0.0 if leaves else source.weight_at(step)

    def _is_finished(self, name: str) -> bool:
        """Whether a source has no more records."""
        epochs = self._sources[name].epochs
        return epochs is not None and self._progress[name].drawn >= epochs * self._sizes[name]

    def _set_weights(self, weights: Mapping[str, float]) -> None:
        """From now on, draw by these weights. If they are new, the lags start anew."""
        if any(self._progress[name].weight != weight for name, weight in weights.items()):
            for name, weight in weights.items():
                drawn = self._progress[name].drawn
                self._progress[name] = SourceProgress(weight, drawn, base=drawn)
        # whole numbers, because ties must be exact: 0.1 x 3 is not 0.3
        exact = {name: Fraction(repr(weight)) for name, weight in weights.items() if weight}
        unit = math.lcm(*(weight.denominator for weight in exact.values()))
        self._shares = {name: int(weight * unit) for name, weight in exact.items()}

    def _draw(self) -> Draw | None:
        """The next draw; None at the end of the data."""
        progress = self._progress
        since, total = 1 + sum(source.drawn - source.base for source in progress.values()), sum(self._shares.values())
        lags = {
            name: share * since - total * (progress[name].drawn - progress[name].base)
            for name, share in self._shares.items()
        }
        # the names are sorted, and max takes the first of equal ones
        name = max(lags, key=lambda name: lags[name], default=None)
        if name is None or self._is_finished(name):
            last = "a source with a weight" if name is None else f"the source {name}"
            self.end = f"{last} has no more records (data.train_set.{name or 'NAME'}.epochs)"
            return None
        draw = Draw(self.names.index(name), progress[name].drawn)
        progress[name].drawn += 1
        if self._sources[name].after_epochs == "others" and self._is_finished(name):
            self._set_weights({**{other: source.weight for other, source in progress.items()}, name: 0.0})
        return draw


def position_at(step: int) -> dict[str, Any]:
    """The position of a mixture that begins after a step of the run."""
    return {"version": VERSION, "step": step}


def _checked(position: Any) -> tuple[int, str | None, dict[str, SourceProgress]]:
    """The step, the order and the progress of each source, of a stored position.

    Raises:
        UserError: it has another form.
    """
    if isinstance(position, dict) and position.get("version") == 1:
        raise UserError(
            f"the stored data position has the order '{position.get('order')}', and this run draws any record: set "
            f"data.train_set, data.shuffle and data.seed to their former values, {or_restart()}"
        )
    try:
        if position["version"] != VERSION:
            raise ValueError("another version")
        progress = {name: _progress(**stored) for name, stored in position.get("sources", {}).items()}
        step, order = position["step"], position.get("order")
        if type(step) is not int or step < 0 or not isinstance(order, str | None):
            raise ValueError("no step")
    # OverflowError: a whole number that no float holds
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(f"the stored data position cannot be read: {position!r}"[:500]) from error
    return step, order, progress


def _progress(*, weight: Any, drawn: Any, base: Any, **_: Any) -> SourceProgress:
    """The progress of a source.

    Raises:
        ValueError: it has another form.
    """
    counts = type(drawn) is int and type(base) is int and 0 <= base <= drawn
    if not counts or type(weight) not in (int, float) or not 0 <= weight < math.inf:
        raise ValueError("not the progress of a source")
    return SourceProgress(float(weight), drawn, base)
