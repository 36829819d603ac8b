"""The group `cluster`: when the driver of a pod calls a worker lost, and how often it begins again."""

from typing import Annotated

from mesh_transformer.fields import Count, CountOrZero, Group, Positive, Unit

Seconds = Annotated[Positive, Unit("seconds")]


class ClusterConfig(Group):
    """How train.py watches its workers. Without a driver these mean nothing."""

    step_limit: Seconds = 20.0
    """a step that takes this much longer than the slowest recent one is a hang; so is any other phase without work for this
    long. Each hang doubles it until the run has passed that step"""
    phase_limit: Seconds = 3600.0
    """a start, a compilation, a wait for data, a validation or a save that takes longer is a hang, even if work is done
    meanwhile"""
    max_crashes: Annotated[CountOrZero, Unit("crashes")] = 5
    """crashes in a row without a newer checkpoint after which the driver still starts the workers again"""
    driver_timeout: Seconds = 20.0
    """workers that hear nothing from a driver for this long save and wait for one"""
    driver_wait: Annotated[Count, Unit("seconds")] = 3600
    """how long they wait for a driver, the same command, before they end"""
