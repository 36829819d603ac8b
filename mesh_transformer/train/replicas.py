"""A `Schedule` whose gradients cross between replicas once a step (mesh.sum_gradients per_step).

Otherwise the partitioner sums the gradient of each layer over the replicas in each microbatch, as soon as it is known.
"""

import functools

import jax
from jax.sharding import PartitionSpec as P

from mesh_transformer.models.stack import Batch
from mesh_transformer.parallel.replicas import Replicas
from mesh_transformer.parallel.sharding import Params, active
from mesh_transformer.train.schedule import Metrics, Parts, Schedule


def summed_once(schedule: Schedule) -> Schedule:
    """`schedule` on each replica, with its part of every microbatch, and then the mean over the replicas.

    A replica's part of a microbatch must be a microbatch with an equal scale of the loss: the mean loss of the parts is
    the loss of the whole microbatch. The squared norms are of the parts, (replicas * A,), or None.
    """
    return schedule._replace(gradients=functools.partial(_gradients, schedule))


def _gradients(
    schedule: Schedule, parts: Parts, trained: Params, frozen: Params, batch: Batch
) -> tuple[Params, Metrics, jax.Array | None]:
    partition = active()
    if partition is None:
        raise AssertionError("replicas need a partition")
    replicas = Replicas(partition)

    def run(trained: Params, frozen: Params, batch: Batch) -> tuple[Params, Metrics, jax.Array | None]:
        gradient, metrics, squares = schedule.gradients(parts, trained, frozen, batch)
        return *replicas.mean((gradient, metrics)), squares

    run = replicas.run(run, (P(), P(), replicas.split(1)), (P(), P(), replicas.split(0)))
    gradient, metrics, squares = run(trained, frozen, batch)
    return parts.constrain(gradient), metrics, squares
