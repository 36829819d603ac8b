"""Checks of the exercises of chapter 7: each runs an answer and compares it with one device, or with a simulation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

STAGES = 4


def _on_stages(function: Callable[..., Any], *arrays: np.ndarray, split: tuple[bool, ...]) -> np.ndarray:
    """The result of a function on each stage, stacked."""
    mesh = jax.make_mesh((STAGES,), ("pp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:STAGES])

    def on_stage(*arrays: jax.Array) -> jax.Array:
        # without the first dimension of what is split
        ours = [x[0] if one else x for x, one in zip(arrays, split, strict=True)]
        result = function(*ours)
        # the sum varies from stage to stage for JAX, also where the result does not: the results are stacked
        return (result + (0 * jax.lax.axis_index("pp")).astype(result.dtype))[None]

    specs = tuple(P("pp") if one else P() for one in split)
    return np.asarray(jax.jit(jax.shard_map(on_stage, mesh=mesh, in_specs=specs, out_specs=P("pp")))(*arrays))


def _difference(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(ours - expected).max())


def check_tick(answer: Callable[..., Any]) -> None:
    """Six microbatches through four stages, each of which multiplies by its own matrix."""
    random = np.random.default_rng(0)
    x = random.standard_normal((6, 2, 8)).astype(np.float32)
    matrices = 0.5 * random.standard_normal((STAGES, 8, 8)).astype(np.float32)

    def pipeline(matrix: jax.Array, x: jax.Array) -> jax.Array:
        def one(arrived: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            sent, y = answer(lambda x: jnp.tanh(x @ matrix), x, arrived, t, STAGES)
            return sent, y

        nothing = jax.lax.pcast(jnp.zeros(x.shape[1:]), "pp", to="varying")
        return jax.lax.scan(one, nothing, jnp.arange(len(x) + STAGES - 1))[1]

    outputs = _on_stages(pipeline, matrices, x, split=(True, False))
    expected = x
    for stage, matrix in enumerate(matrices):
        expected = np.tanh(expected @ matrix)
        far = _difference(outputs[stage, stage : stage + len(x)], expected)
        hint = "does it take microbatch t?" if stage == 0 else "does it compute what the stage before has sent?"
        hint += " Is the first result what is sent, and the second the output of this stage?"
        assert far < 1e-5, f"stage {stage} differs from one device by {far:.2g} where numbers are about 1: {hint}"


def check_tied_gradient(answer: Callable[..., Any]) -> None:
    """Gradients of random numbers; on stages where they have no meaning, they are 1000."""
    random = np.random.default_rng(1)
    of_embedding, of_head = np.full((2, STAGES, 5, 3), 1000, np.float32)
    of_embedding[0], of_head[-1] = random.standard_normal((2, 5, 3))

    def run(of_embedding: jax.Array, of_head: jax.Array) -> jax.Array:
        return answer(of_embedding, of_head, STAGES)

    found = _on_stages(run, of_embedding, of_head, split=(True, True))
    expected = of_embedding[0] + of_head[-1]
    for stage, ours in enumerate(found):
        far = _difference(ours, expected)
        hint = "is something added that has no meaning there?" if far > 100 else "are the parts of all stages summed?"
        assert far < 1e-5, f"on stage {stage} the gradient differs from one device by {far:.2g}: {hint}"


def check_item(answer: Callable[..., Any]) -> None:
    """Every microbatch passes every virtual stage once, one tick after the one before, in as few ticks as possible."""
    for stages, rounds, microbatches in ((4, 2, 8), (2, 3, 6), (4, 1, 8), (3, 2, 3)):
        name, seen = f"with {stages} stages, {rounds} rounds, {microbatches} microbatches", {}
        ticks = rounds * microbatches + stages - 1
        for t in range(ticks):
            for stage in range(stages):
                found = answer(t, stage, stages, rounds, microbatches)
                if found is not None:
                    microbatch, turn = found
                    assert (microbatch, turn * stages + stage) not in seen, (
                        f"{name}, stage {stage} computes microbatch {microbatch} of round {turn} again in tick {t}"
                    )
                    seen[microbatch, turn * stages + stage] = t
        work = {(m, c) for m in range(microbatches) for c in range(rounds * stages)}
        missing, unknown = work - set(seen), set(seen) - work
        assert not unknown, (
            f"{name}, there is no microbatch and virtual stage {min(unknown)}, which the answer has in tick "
            f"{seen[min(unknown)]}: "
            "a stage without work has None"
        )
        assert not missing, (
            f"{name}, {len(missing)} of {rounds * stages * microbatches} pairs of microbatch and virtual stage are "
            f"not computed in the first {ticks} ticks, such as (microbatch, virtual stage) {min(missing)}"
        )
        for (microbatch, virtual_stage), t in seen.items():
            before = seen.get((microbatch, virtual_stage - 1), t - 1)
            assert t == before + 1, (
                f"{name}, microbatch {microbatch} is in virtual stage {virtual_stage} in tick {t} and in the one "
                f"before in tick {before}: it has to come exactly one tick later"
            )


def check_kept(answer: Callable[..., Any]) -> None:
    """Against a count over all ticks."""
    for stages, microbatches in ((4, 8), (4, 3), (2, 16), (1, 4), (8, 10)):
        for stage in range(stages):
            spans = [(i + stage, i + 2 * (stages - 1) - stage) for i in range(microbatches)]
            last = max(end for _, end in spans)
            expected = max(sum(start <= t <= end for start, end in spans) for t in range(last + 1))
            found = answer(stage, stages, microbatches)
            assert found == expected, (
                f"stage {stage} of {stages} keeps {expected} of {microbatches} microbatches, and the answer is {found}"
            )
