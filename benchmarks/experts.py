"""One layer of routed experts on this machine: operations, temporaries and time, beside other ways to compute it, and
the time of decoding by the number of experts.

    python benchmarks/experts.py

Ways: ours; capacity: each expert computes at most 1.25 times its mean number of choices, and the others are dropped;
ragged_dot: JAX's product of groups of rows; dense: every token goes through every expert.
"""

import argparse
import math
import random
import time
from collections.abc import Callable
from typing import Any

from common import end, median, parse, parser, report, say

# tokens and width of the layer, and experts, choices and width of an expert of each case
TOKENS, WIDTH = 512, 256
CASES = {"16 experts, 2 chosen": (16, 2, 256), "64 experts, 8 chosen": (64, 8, 128)}
FACTOR = 1.25
# of a product of two float32 arrays of ours and of another way, relative to the largest value
CLOSE = 1e-5
# experts of the decoding layers
DECODE = {"experts": (8, 64), "chosen": 2, "width": 512, "expert_width": 512}


def main() -> None:
    """Measure and report; exit with code 1 if ways that drop nothing differ."""
    arguments = parse(parser(__doc__, config=None, rounds=45))
    found = {name: layer(arguments, *case) for name, case in CASES.items()}
    different = [f"{name}, {way}" for name, rows in found.items() for way, row in rows.items() if row.pop("differs")]
    report({"tokens": TOKENS, "width": WIDTH, "layers": found, "decode": [decode(arguments, n) for n in (1, 8)]})
    end(different)


def layer(arguments: argparse.Namespace, experts: int, chosen: int, expert_width: int) -> dict[str, dict[str, Any]]:
    """The figures of each way; times in turn."""
    import jax

    inputs = _inputs(TOKENS, WIDTH, experts, chosen, expert_width)
    forwards = _ways(inputs)
    programs: dict[tuple[str, str], Any] = {}
    for way, forward in forwards.items():
        gradients = jax.grad(lambda floats, forward=forward: (forward(*floats) ** 2).sum())
        programs[way, "forward"] = jax.jit(forward).lower(*inputs["floats"]).compile()
        programs[way, "gradients"] = jax.jit(gradients).lower(inputs["floats"]).compile()
        say(f"compiled {experts} experts, {way}")
    arrays = {
        what: (inputs["floats"] if what == "forward" else (inputs["floats"],)) for what in ("forward", "gradients")
    }
    seconds = _in_turn(arguments.rounds, {key: (program, arrays[key[1]]) for key, program in programs.items()})
    needed = 3 * 2 * TOKENS * chosen * WIDTH * expert_width
    rows: dict[str, dict[str, Any]] = {}
    for way in forwards:
        rows[way] = {}
        for what, times in ("forward", 1), ("gradients", 3):
            program: Any = programs[way, what]
            flops = program.cost_analysis()["flops"] + (_more_flops(inputs, times) if way == "ours" else 0)
            rows[way][what] = {
                "flops_ratio": median([flops / needed / times]),
                "temporaries_mib": median([program.memory_analysis().temp_size_in_bytes / 2**20]),
                "ms": median([1e3 * value for value in seconds[way, what]]),
                "ours_relative": median(
                    [a / b for a, b in zip(seconds["ours", what], seconds[way, what], strict=True)]
                ),
            }
    for way, row in rows.items():
        pairs = [(programs["ours", what], programs[way, what], arrays[what]) for what in arrays]
        row["differs"] = way != "capacity" and any(_differs(*pair) for pair in pairs)
    return rows


def decode(arguments: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Milliseconds of the experts of `tokens` tokens, by the number of experts."""
    import jax

    programs = {}
    for experts in DECODE["experts"]:
        inputs = _inputs(tokens, DECODE["width"], experts, DECODE["chosen"], DECODE["expert_width"])
        programs[experts] = jax.jit(_ways(inputs)["ours"]).lower(*inputs["floats"]).compile(), inputs["floats"]
    seconds = _in_turn(20 * arguments.rounds, programs)
    few, many = DECODE["experts"]
    return {
        "tokens": tokens,
        **{key: value for key, value in DECODE.items() if key != "experts"},
        **{f"ms_{experts}_experts": median([1e3 * value for value in values]) for experts, values in seconds.items()},
        "ratio": median([b / a for a, b in zip(seconds[few], seconds[many], strict=True)]),
    }


def _inputs(tokens: int, width: int, experts: int, chosen: int, expert_width: int) -> dict[str, Any]:
    """Random tokens, choices and matrices."""
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])

    x = normal(1, tokens, width) * math.sqrt(tokens)
    scores, numbers = jax.lax.top_k(jax.nn.softmax(normal(1, tokens, experts) * math.sqrt(tokens)), chosen)
    wide = (experts, width, expert_width)
    matrices = normal(*wide), normal(*wide), normal(experts, expert_width, width)
    return {"floats": (x, scores, *matrices), "numbers": jnp.asarray(numbers)}


def _ways(inputs: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Each way, as a function of the floating-point inputs."""
    import jax
    import jax.numpy as jnp

    from mesh_transformer.ops.experts import Dispatch, Routing, apply
    from mesh_transformer.ops.experts.layer import ExpertWeights
    from mesh_transformer.ops.experts.rows import Queues, Rows, combine, spread

    numbers = inputs["numbers"]

    def ours(dispatch: Dispatch, x: Any, scores: Any, *matrices: Any) -> Any:
        return apply(dispatch, x, Routing(scores, numbers, scores), *matrices, jax.nn.silu)[0]

    def ragged_dot(x: Any, scores: Any, *matrices: Any) -> Any:
        queues = Queues.of(numbers[0].T, len(matrices[0]))
        rows = Rows.of(queues.order_kN, numbers.size)

        def products(x: Any, ws: Any, _: Any) -> Any:
            return tuple(jax.lax.ragged_dot(x, w, queues.sizes_E) for w in ws)

        y = ExpertWeights(*matrices).apply(spread(x[0], rows), products, jax.nn.silu)
        return combine(y, scores[0].T, rows)[None]

    def dense(x: Any, scores: Any, *matrices: Any) -> Any:
        gate, in_, out = matrices
        hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, in_)
        weights = jnp.einsum("btk,btke->bte", scores, jax.nn.one_hot(numbers, len(gate)))
        return jnp.einsum("btef,efd->btd", hidden * weights[..., None], out)

    return {
        "ours": lambda *floats: ours(Dispatch(), *floats),
        "capacity": lambda *floats: ours(Dispatch(capacity_factor=FACTOR), *floats),
        "ragged_dot": ragged_dot,
        "dense": dense,
    }


def _more_flops(inputs: dict[str, Any], times: int) -> float:
    """The operations of loops after their first trip: XLA counts the body of a loop once. A trip is a product of a
    block of rows, and for a gradient of a matrix also its sum."""
    import numpy as np

    from mesh_transformer.ops.experts import row_loop

    gate = inputs["floats"][2]
    sizes = np.bincount(np.ravel(inputs["numbers"]), minlength=len(gate))
    rows = row_loop.block_rows(int(sizes.sum()), len(sizes))
    matrix, blocks = gate[0].size, int((-(-sizes // rows)).sum())
    product = (blocks - 1) * 2 * rows * matrix
    first, rows = row_loop.gradient_rows(int(sizes.sum()), len(sizes))
    groups, blocks = int((sizes > 0).sum()), int((-((first - sizes) // rows)).clip(0).sum())
    gradient = (groups - 1) * 2 * first * matrix + (blocks - 1) * (2 * rows + 1) * matrix
    return 3.0 * (product if times == 1 else 2 * product + gradient)


def _in_turn(rounds: int, programs: dict[Any, tuple[Any, tuple[Any, ...]]]) -> dict[Any, list[float]]:
    """The seconds of each program in each round. The order changes, since a program finds in the caches what the one
    before it left there."""
    import jax

    seconds: dict[Any, list[float]] = {key: [] for key in programs}
    for number in range(rounds + 1):
        for key in random.Random(number).sample(list(programs), len(programs)):
            program, arrays = programs[key]
            began = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            if number:
                seconds[key].append(time.perf_counter() - began)
    return seconds


def _differs(ours: Any, other: Any, arrays: tuple[Any, ...]) -> bool:
    import jax
    import jax.numpy as jnp

    pairs = zip(*(jax.tree.leaves(program(*arrays)) for program in (ours, other)), strict=True)
    return any(float(jnp.abs(a - b).max() / jnp.abs(b).max()) > CLOSE for a, b in pairs)


if __name__ == "__main__":
    main()
