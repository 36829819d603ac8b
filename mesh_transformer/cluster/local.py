"""A job in this process, on its devices."""

from __future__ import annotations

from typing import Any

from mesh_transformer.cluster import jobs
from mesh_transformer.cluster.base import Job
from mesh_transformer.runtime.feeds import open_train_feed
from mesh_transformer.runtime.observer import Observer


def run(job: Job) -> tuple[int, Any]:
    """The exit code and the result of a job.

    Raises:
        UserError, RunError: as the job does.
    """
    outcome = jobs.run(job.name, job.config, job.arguments, jobs.Around(Observer(), open_train_feed))
    return outcome.code, outcome.result
