"""What all examples share: the loop, the comparison with one device, the report and data."""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mesh_transformer.estimate import collective_bytes
from mesh_transformer.models import HaikuModel
from mesh_transformer.parallel import Partition, UserError, make_mesh, mesh_shape
from mesh_transformer.train import Optimizer, jit

TOLERANCE = 1e-5
# A large eps: Adam would divide the rounding error of a tiny gradient by that gradient.
ADAM = {"lr": 1e-2, "end_lr": 1e-2, "warmup_steps": 4, "eps": 1e-3}


def say(text: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{text}\n")


class Run(NamedTuple):
    """A finished training run.

    Args:
        params: the parameters after the steps that are compared with one device.
        losses: the losses of these steps.
        collectives: the bytes that a device receives in a step, by kind.
        trained: the parameters after all steps.
        results: what else the example measures, by name.
    """

    params: Any
    losses: list[float]
    collectives: dict[str, int]
    trained: Any
    results: dict[str, float] = {}


def fit(
    partition: Partition,
    model: HaikuModel,
    optimizer: Optimizer,
    step: Callable[..., Any],
    batches: Any,
    slots: Partition | None = None,
    compared: int | None = None,
) -> Run:
    """Train with `step`: (parameters, optimizer state, batch) -> the new ones and the loss.

    Args:
        batches: a tree of arrays (steps, A, B, ...).
        slots: the partition of the optimizer state; None: that of the parameters.
        compared: the number of steps that are compared with one device: rounding errors grow with steps; None: all.
    """
    shardings = partition.shardings(model.axes)
    params = jit(partition, model.init, out_shardings=shardings)(jax.random.key(0))
    of_state = optimizer.shardings(slots or partition, params)
    state = jit(partition, optimizer.init, out_shardings=of_state)(params)
    steps = [jax.tree.map(lambda x, n=n: x[n], batches) for n in range(len(jax.tree.leaves(batches)[0]))]
    step = jit(partition, step, donate_argnums=(0, 1), out_shardings=(shardings, of_state, None))
    compiled = step.lower(params, state, steps[0]).compile()
    losses: list[float] = []
    for batch in steps:
        params, state, loss = compiled(params, state, batch)
        losses.append(float(loss))
        if len(losses) == (compared or len(steps)):
            # the next step donates the parameters
            early = jax.device_get(params)
    return Run(early, losses[:compared], collective_bytes(compiled.as_text()), params)


def difference(run: Run, one: Run) -> float:
    """The largest difference of two runs: of the losses, and of the trained parameters in units of the largest value of
    their array."""

    def of(ours: jax.Array, theirs: jax.Array) -> float:
        return float(np.abs(np.asarray(ours) - np.asarray(theirs)).max() / np.abs(np.asarray(theirs)).max())

    return max(
        of(np.array(run.losses), np.array(one.losses)), *jax.tree.leaves(jax.tree.map(of, run.params, one.params))
    )


def say_parameters(params: Any) -> None:
    """What each device holds of the parameters."""
    say("parameters: whole -> on each device")
    for path, array in jax.tree.leaves_with_path(params):
        part = array.sharding.shard_shape(array.shape)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        say(f"  {name:32} {array.shape!s:16} -> {part!s:16} 1/{math.prod(array.shape) // math.prod(part)}")


def sizes(arguments: Sequence[str]) -> dict[str, int]:
    """The sizes of mesh axes, from arguments such as tp=2."""
    if wrong := [argument for argument in arguments if not re.fullmatch("[a-z]+=[1-9][0-9]{0,3}", argument)]:
        raise UserError(f"{' '.join(wrong)}: give sizes of mesh axes, such as dp=4 tp=2")
    return {axis: int(size) for axis, size in (argument.split("=") for argument in arguments)}


def run(
    example: str,
    train: Callable[[Partition], Run],
    partition: Callable[..., Partition],
    mesh: dict[str, int],
    arguments: Sequence[str] = (),
) -> int:
    """Train on a mesh and on one device, print both, and return the exit code.

    Args:
        partition: mesh -> Partition.
        mesh: the size of each axis; `arguments` such as tp=2 dp=4 replace it.
    """
    mesh = sizes(arguments) or mesh
    try:
        devices = jax.devices()[: math.prod(mesh.values())]
    # without a GPU, JAX raises an AssertionError without a text
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"no device of JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} found: unset it; {error}") from error
    say(f"mesh: {' x '.join(f'{axis} {size}' for axis, size in mesh.items())} ({len(devices)} x {devices[0].platform})")
    ours = train(partition(make_mesh(mesh_shape(**mesh), devices)))
    say_parameters(ours.trained)
    say("collectives of a step: bytes that a device receives")
    for kind, size in ours.collectives.items():
        say(f"  {kind:32} {size:,}")
    for name, value in ours.results.items():
        say(f"{name}: {value:.3f}")
    say(f"loss:          {' '.join(f'{loss:.4f}' for loss in ours.losses)}")
    one = train(partition(make_mesh(mesh_shape(), devices[:1])))
    say(f"on one device: {' '.join(f'{loss:.4f}' for loss in one.losses)}")
    far = difference(ours, one)
    result = {"example": example, "mesh": mesh, "collectives": ours.collectives, "losses": ours.losses}
    say(json.dumps({**result, **ours.results, "difference": far}))
    return 0 if ours.losses[-1] < ours.losses[0] and far <= TOLERANCE else 1


def main(name: str, train: Callable[[Partition], Run], partition: Callable[..., Partition], mesh: Any) -> None:
    """`run` as a command."""
    try:
        sys.exit(run(name.rpartition(".")[2], train, partition, mesh, sys.argv[1:]))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def sequences(steps: int, microbatches: int, rows: int, length: int, vocabulary: int, strides: int = 1) -> np.ndarray:
    """(steps, microbatches, rows, length + 1) int32 tokens: each is the one before plus one of `strides` numbers."""
    draws = np.random.default_rng(0).integers(0, [vocabulary, strides], (steps, microbatches, rows, 2))
    return ((draws[..., :1] + (1 + draws[..., 1:]) * np.arange(length + 1)) % vocabulary).astype(np.int32)


# the digits that have each segment: top, left and right above, middle, left and right below, bottom
SEGMENTS = "02356789", "045689", "01234789", "2345689", "0268", "013456789", "0235689"


def digits(count: int, side: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Images (count, side, side) of digits of seven segments, at several places, sizes and brightnesses and with noise,
    and their labels (count,). The least side is 15."""
    labels = random.integers(0, 10, count)
    images = np.zeros((count, side, side))
    for image, label in zip(images, labels, strict=True):
        # the place of a digit, and the lengths of its segments
        y, x = random.integers(1, 3, 2)
        down, right = random.integers([5, 6], [7, 9])
        upper, lower, across = slice(y, y + down + 1), slice(y + down, y + 2 * down + 1), slice(x, x + right + 1)
        verticals = (upper, x), (upper, x + right), (lower, x), (lower, x + right)
        segments = (y, across), *verticals[:2], (y + down, across), *verticals[2:], (y + 2 * down, across)
        for lit, segment in zip(SEGMENTS, segments, strict=True):
            if str(label) in lit:
                image[segment] = 1
    images = random.uniform(0.7, 1.3, (count, 1, 1)) * images + random.normal(0, 0.2, images.shape)
    return {"images": images.astype(np.float32), "labels": labels.astype(np.int32)}
