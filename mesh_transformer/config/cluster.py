"""The group `cluster`: when the driver of a pod calls a worker lost, and how often it begins again."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mesh_transformer.config.base import Count, CountOrZero, Group, Positive, Unit

Seconds = Annotated[Positive, Unit("seconds")]


class ClusterConfig(Group):
    """How train.py watches its workers. Without a driver these mean nothing."""

    step_limit: Seconds = Field(
        20.0,
        description="a step that takes so much longer than the slowest one of late is a hang; so is any other phase in "
        "which nothing is done for so long. Doubled by each hang, until the run is past its step",
    )
    phase_limit: Seconds = Field(
        3600.0,
        description="starting, compiling, waiting for data, one validation or one save that takes longer is a hang, "
        "whatever is done meanwhile",
    )
    max_crashes: Annotated[CountOrZero, Unit("crashes")] = Field(
        5, description="crashes in a row, without a newer checkpoint, after which the driver begins again"
    )
    driver_timeout: Seconds = Field(
        20.0, description="workers that no driver asks for so long save and wait for one"
    )
    driver_wait: Annotated[Count, Unit("seconds")] = Field(
        3600, description="how long they wait for the same command before they end"
    )
