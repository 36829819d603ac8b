"""The group `cluster`: when the driver of a pod calls a worker lost, and how often it begins again."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mesh_transformer.fields import Count, CountOrZero, Group, Positive, Unit

Seconds = Annotated[Positive, Unit("seconds")]


class ClusterConfig(Group):
    """How train.py watches its workers. Without a driver these mean nothing."""

    step_limit: Seconds = Field(
        20.0,
        description="a step that takes this much longer than the slowest recent one is a hang; so is any other phase "
        "without work for this long. Each hang doubles it until the run has passed that step",
    )
    phase_limit: Seconds = Field(
        3600.0,
        description="a start, a compilation, a wait for data, a validation or a save that takes longer is a hang, even "
        "if work is done meanwhile",
    )
    max_crashes: Annotated[CountOrZero, Unit("crashes")] = Field(
        5,
        description="crashes in a row without a newer checkpoint after which the driver still starts the workers again",
    )
    driver_timeout: Seconds = Field(
        20.0, description="workers that hear nothing from a driver for this long save and wait for one"
    )
    driver_wait: Annotated[Count, Unit("seconds")] = Field(
        3600, description="how long they wait for a driver, the same command, before they end"
    )
