"""Runs the pending tasks of a stage, and shows the progress."""

import contextlib
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from mesh_transformer.dataset.counts import add_reasons
from mesh_transformer.dataset.fragment import Fragment
from mesh_transformer.dataset.objects import R, read_result
from mesh_transformer.dataset.tasks import Runner
from mesh_transformer.dataset.worker import Task
from mesh_transformer.errors import plural
from mesh_transformer.logs import Progress, log

_READS_AT_ONCE = 16
_MEGABYTE = 1_000_000


class Named(NamedTuple):
    """A task. `done` is the marker object; `result` is the object whose header holds the task's result."""

    task: Task
    done: str
    result: str


class Shown:
    """The values in the progress line of a stage."""

    def add(self, result: object) -> None:
        """Count the result of a task."""

    def values(self) -> dict[str, str]:
        """Names and values."""
        return {}


class ShownFragments(Shown):
    """Tokens a second of this process and its workers, and what was dropped. The rate counts the time after the first
    fragment, because the time before includes the start of the workers."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._tokens = 0
        self._dropped: dict[str, int] = {}

    def add(self, result: object) -> None:
        if isinstance(result, Fragment):
            self._tokens += result.train.tokens + result.val.tokens
            self._dropped = add_reasons([self._dropped, result.dropped])
            self._first = self._first or (self._tokens, time.monotonic())

    def values(self) -> dict[str, str]:
        values = {}
        if self._first is not None and self._tokens > self._first[0]:
            rate = (self._tokens - self._first[0]) / max(time.monotonic() - self._first[1], 1e-9)
            values["tokens/s"] = f"{rate:,.0f}"
        if self._dropped:
            values["dropped"] = ", ".join(f"{count:,} {reason}" for reason, count in self._dropped.items())
        return values


class JobStages:
    """Runs the stages of a job.

    Args:
        existing: the objects that the output folder and its folder `work` have at the start of the command.
    """

    def __init__(self, runner: Runner, existing: AbstractSet[str]):
        self._runner, self._existing = runner, existing

    def run(
        self,
        what: str,
        named: Sequence[Named],
        kind: type[R],
        check: Callable[[R], None] = lambda _: None,
        sizes: Sequence[float] | None = None,
        shown: Shown | None = None,
    ) -> list[R]:
        """The results of all tasks, in order. Tasks that are done are not run again.

        Args:
            check: called for each result, of this run and of earlier ones.
            sizes: bytes of the input of each task. None: the progress counts tasks.
        """
        results = self._earlier(what, named, kind)
        for result in results.values():
            check(result)
        todo = [number for number in range(len(named)) if number not in results]
        shown = shown or Shown()
        weights = [1.0] * len(named) if sizes is None else [size / _MEGABYTE for size in sizes]
        done = sum(weights[number] for number in results)
        total = max(1, round(sum(weights)))
        unit = "tasks" if sizes is None else "MB"
        progress = Progress(f"{what} ({unit})", total, unit=unit, done=min(round(done), total))
        with contextlib.closing(progress):
            for place, result in self._runner.run([named[number].task for number in todo]):
                number = todo[place]
                results[number] = result
                check(result)
                shown.add(result)
                done += weights[number]
                last = len(results) == len(named)
                progress.update(total if last else min(round(done), total - 1), **shown.values())
        return [results[number] for number in range(len(named))]

    def _earlier(self, what: str, named: Sequence[Named], kind: type[R]) -> dict[int, R]:
        """The results of the tasks that are done, by number."""
        done = [number for number, named_task in enumerate(named) if named_task.done in self._existing]
        if not done:
            return {}
        log.info("%s: %d of %s are finished already", what, len(done), plural(len(named), "task"))
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            results = pool.map(lambda number: read_result(kind, named[number].result), done)
            return dict(zip(done, results, strict=True))
