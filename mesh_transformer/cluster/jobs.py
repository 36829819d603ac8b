"""The jobs that workers know, by name. All workers of a cluster run the same one, in one mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from mesh_transformer.cluster.base import Job
from mesh_transformer.config import Config, parse_config
from mesh_transformer.data.loader import Loader
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.feeds import open_train_feed
from mesh_transformer.runtime.observer import Observer
from mesh_transformer.runtime.session import Session

OpenFeed = Callable[[Session], Loader]


class Outcome(NamedTuple):
    """The exit code of a job, and what it gave, as JSON values: the same in all workers, or that of worker 0."""

    code: int
    result: Any = None


def run(job: Job, observer: Observer | None = None, open_feed: OpenFeed = open_train_feed) -> Outcome:
    """Run a job in this process, on its devices.

    Raises:
        UserError: there is no such job, or it cannot be done with this config.
        RunError: as the job does.
    """
    if job.name not in JOBS:
        raise UserError(f"unknown job {job.name!r}: the known ones are {', '.join(JOBS)}")
    return JOBS[job.name](parse_config(job.config), job.arguments, observer or Observer(), open_feed)


def _train(config: Config, arguments: dict[str, Any], observer: Observer, open_feed: OpenFeed) -> Outcome:
    """`arguments`: the fields of `runtime.start.Source`. The result: those of its `Ending`."""
    from mesh_transformer.runtime import start, trainer

    ending = trainer.train(config, start.Source(**arguments), observer, open_feed)
    return Outcome(ending.code, ending._asdict())


def _evaluate(config: Config, arguments: dict[str, Any], observer: Observer, _: OpenFeed) -> Outcome:
    """`arguments`: the fields of `runtime.evals.command.Options`. The result: those of its `Evaluation`."""
    from mesh_transformer.runtime.evals import command

    observer.phase("evaluate", 0)
    options = command.Options(**{**arguments, "tasks": tuple(arguments["tasks"])})
    return Outcome(0, command.evaluate(config, options)._asdict())


def _generate(config: Config, arguments: dict[str, Any], observer: Observer, _: OpenFeed) -> Outcome:
    """`arguments`: checkpoint, prompts (texts, or lists of token ids), request. The result: a list of samples a prompt."""
    from mesh_transformer.runtime import sample_prompts, sample_request

    observer.phase("generate", 0)
    request = sample_request.Request(**arguments["request"])
    answers = sample_prompts.answer(config, request, arguments["checkpoint"], arguments["prompts"])
    return Outcome(0, [[dataclasses.asdict(sample) for sample in samples] for samples in answers])


JOBS = {"train": _train, "evaluate": _evaluate, "generate": _generate}
