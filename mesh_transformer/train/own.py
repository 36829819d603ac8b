"""Gradients and losses of a model of one's own, for the active partition.

Shapes: A microbatches, B rows of a microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from mesh_transformer import platforms
from mesh_transformer.errors import UserError, listed
from mesh_transformer.models.stack import Batch, Results
from mesh_transformer.parallel.sharding import Params, Partition, active, use
from mesh_transformer.spec import pipelined_group
from mesh_transformer.train import pipeline
from mesh_transformer.train.schedule import Metrics, ModelFunctions, StepSchedule, microbatches, sequential


def gradients(
    parts: ModelFunctions, params: Params, batch: Batch, *, frozen: Params | None = None, rounds: int = 1
) -> tuple[Params, Metrics, jax.Array | None]:
    """The mean gradient of the microbatches of a step, float32; the mean metrics; the squared norm of each microbatch's
    gradient, (A,), or None with stages.

    A partition that splits "layers" makes a pipeline of stages: 1F1B, or interleaved 1F1B with several rounds.

    Args:
        params: the trained parameters, in the dtype of the arithmetic.
        batch: a tree of arrays (A, B, ...).
        frozen: the second argument of `ModelFunctions.transform`, by default an empty tree.
        rounds: virtual stages on each stage of a pipeline.

    Raises:
        UserError: the stages do not divide the layers, or a dimension of the batch.
    """
    schedule = _schedule(rounds, parts, parts.transform(params, frozen or {}), batch, 2)
    return schedule.gradients(parts, params, frozen or {}, batch)


def loss(parts: ModelFunctions, params: Params, batch: Batch, *, rounds: int = 1) -> tuple[jax.Array, Results]:
    """The results of `ModelFunctions.loss` without a gradient.

    Args:
        params: the parameters of the whole model, in the dtype of the arithmetic.
        batch: a tree of arrays (B, ...).
        rounds: as in `gradients`.

    Raises:
        UserError: as in `gradients`.
    """
    return _schedule(rounds, parts, params, batch, 1).loss(parts, params, batch)[:2]


def jit(partition: Partition, function: Callable[..., object], **options: Any) -> jax.stages.Wrapped:
    """`jax.jit` of a function that is traced for `partition`, with the compiler options that its devices need.

    Several CPU devices need one: without it a program can wait for ever.

    Args:
        options: arguments of `jax.jit`, such as out_shardings.
    """

    @functools.wraps(function)
    def traced(*args: object, **kwargs: object) -> object:
        with use(partition):
            return function(*args, **kwargs)

    devices = partition.devices.flatten().tolist()
    return jax.jit(traced, compiler_options=platforms.compiler_options(devices), **options)


def _schedule(rounds: int, parts: ModelFunctions, params: Params, batch: Batch, leading: int) -> StepSchedule:
    """The schedule for the active partition. `leading`: dimensions of a batch up to its rows, 2 with microbatches."""
    partition = active()
    stages = 1 if partition is None else partition.size("layers")
    if partition is None or stages == 1:
        return sequential
    groups = parts.layout(params["blocks"])
    if pipelined_group(groups, stages * rounds) is None:
        each = listed([f"{group.repeats} x {len(group.period)}" for group in groups])
        raise UserError(
            f"the layers are {each} (repeats of a period x its layers): {stages} stages x {rounds} rounds of a "
            "pipeline divide none"
        )
    if leading == 2 and rounds > 1 and microbatches(batch) % stages:
        raise UserError(f"{microbatches(batch)} microbatches are not divisible by {stages} stages, as rounds need")
    place, shards = parts.stream_axes.index(parts.shared_out), partition.size(parts.shared_out)
    for x in jax.tree.leaves(batch):
        at = leading - 1 + place
        if x.ndim <= at or x.shape[at] % (stages * shards):
            raise UserError(
                f"{stages} stages share out the dimension {parts.shared_out} of a batch for the loss, and {shards} "
                f"devices of each split it: dimension {at} of an array {x.shape} is not divisible by {stages * shards}"
            )
    return pipeline.schedule(rounds)
