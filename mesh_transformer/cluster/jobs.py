"""The jobs that workers know, by name. All workers of a cluster run the same one, in one mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from mesh_transformer.config import Config, parse_config
from mesh_transformer.data.loader import Loader
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.observer import Observer
from mesh_transformer.runtime.session import Session


class Around(NamedTuple):
    """What surrounds a job in its process."""

    observer: Observer
    open_feed: Callable[[Session], Loader]


class Outcome(NamedTuple):
    """The exit code of a job, and what it gave, as JSON values: the same in all workers, or that of worker 0."""

    code: int
    result: Any = None


def run(name: str, config: dict[str, Any], arguments: dict[str, Any], around: Around) -> Outcome:
    """Run a job by its name.

    Raises:
        UserError: there is no such job, or it cannot be done with this config.
    """
    if name not in JOBS:
        raise UserError(f"unknown job {name!r}: the known ones are {', '.join(JOBS)}")
    return JOBS[name](parse_config(config), arguments, around)


def _train(config: Config, arguments: dict[str, Any], around: Around) -> Outcome:
    """`arguments`: the fields of `runtime.start.Source`. The result: those of its `Ending`."""
    from mesh_transformer.runtime import start, trainer

    ending = trainer.train(config, start.Source(**arguments), around.observer, around.open_feed)
    return Outcome(ending.code, ending._asdict())


def _evaluate(config: Config, arguments: dict[str, Any], around: Around) -> Outcome:
    """`arguments`: the fields of `runtime.evals.command.Options`. The result: those of its `Evaluation`."""
    from mesh_transformer.runtime.evals import command

    around.observer.phase("evaluate", 0)
    options = command.Options(**{**arguments, "tasks": tuple(arguments["tasks"])})
    return Outcome(0, command.evaluate(config, options)._asdict())


def _generate(config: Config, arguments: dict[str, Any], around: Around) -> Outcome:
    """`arguments`: checkpoint, prompts (texts, or lists of token ids), request. The result: a list of samples a prompt."""
    from mesh_transformer.runtime import sample_prompts, sample_request

    around.observer.phase("generate", 0)
    request = sample_request.Request(**arguments["request"])
    answers = sample_prompts.answer(config, request, arguments["checkpoint"], arguments["prompts"])
    return Outcome(0, [[dataclasses.asdict(sample) for sample in samples] for samples in answers])


JOBS: dict[str, Callable[[Config, dict[str, Any], Around], Outcome]] = {
    "train": _train,
    "evaluate": _evaluate,
    "generate": _generate,
}
