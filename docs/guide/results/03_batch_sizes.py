"""How many steps and rows each batch size needs to reach one loss: writes 03_batch_sizes.json beside this file.

    python docs/guide/results/03_batch_sizes.py

The model and the rows of chapter 3, plain SGD. For each batch size the learning rate is tuned: it is doubled or halved
as long as fewer steps reach the loss. The script also measures the noise scale on the way, from per-row gradients. It
takes some minutes of CPU time on one device.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

HERE = Path(__file__).resolve()
TEXT = HERE.parents[3] / "data" / "tiny_shakespeare" / "train.txt"
CONTEXT, TARGET_LOSS = 8, 2.4
BATCHES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
# steps between two measurements of the loss, and rows of a measurement
ROWS_BETWEEN, MEASURED_ROWS = 4096, 4096
# a run ends without a result after so many rows, or steps
MOST_ROWS, MOST_STEPS = 2_000_000, 100_000

Params = dict[str, jax.Array]


def initial() -> Params:
    """The model of chapter 3 before training."""
    table, layers, logits = jax.random.split(jax.random.key(0), 3)
    return {
        "table": jax.random.normal(table, (128, 16)),
        "layers": 0.1 * jax.random.normal(layers, (2, 128, 128)),
        "logits": 0.05 * jax.random.normal(logits, (128, 128)),
    }


def loss(params: Params, contexts: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean loss of rows, nats: contexts (B, 8), targets (B,)."""
    x = params["table"][contexts].reshape(len(contexts), -1)
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w)
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["logits"], targets).mean()


@functools.partial(jax.jit, static_argnames=("batch", "steps"))
def train(text: jax.Array, params: Params, key: jax.Array, rate: jax.Array, *, batch: int, steps: int) -> Params:
    """The parameters after so many steps of SGD."""

    def step(params: Params, key: jax.Array) -> tuple[Params, None]:
        contexts, targets = rows(text, key, batch)
        gradient = jax.grad(loss)(params, contexts, targets)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradient), None

    return jax.lax.scan(step, params, jax.random.split(key, steps))[0]


def rows(text: jax.Array, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Contexts and targets at random places of the text."""
    starts = jax.random.randint(key, (count,), 0, len(text) - CONTEXT)
    windows = text[starts[:, None] + jnp.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, -1]


measure = jax.jit(loss)


def steps_to_target(text: jax.Array, batch: int, rate: float) -> float:
    """The steps until the loss is reached, interpolated; infinity if it is not."""
    measured, params, key = rows(text, jax.random.key(1), MEASURED_ROWS), initial(), jax.random.key(2)
    between, before, steps = max(2, ROWS_BETWEEN // batch), float(measure(initial(), *measured)), 0
    while steps < MOST_STEPS and steps * batch < MOST_ROWS and before < 2 * np.log(128):
        key, chunk = jax.random.split(key)
        params = train(text, params, chunk, rate, batch=batch, steps=between)
        now = float(measure(params, *measured))
        if now <= TARGET_LOSS:
            return steps + between * (before - TARGET_LOSS) / (before - now)
        before, steps = now, steps + between
    return float("inf")


def tuned(text: jax.Array, batch: int, rate: float) -> tuple[float, float]:
    """The learning rate with the fewest steps, found from a first one by factors of two; and these steps."""
    found = {rate: steps_to_target(text, batch, rate)}
    for factor in (2.0, 0.5):
        while (best := min(found, key=lambda one: found[one])) * factor not in found:
            found[best * factor] = steps_to_target(text, batch, best * factor)
    return best, found[best]


@jax.jit
def noise_scale(params: Params, contexts: jax.Array, targets: jax.Array) -> jax.Array:
    """tr(Sigma) / |G|^2 at these parameters, both without bias."""

    def square(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        return optax.tree.norm(jax.grad(loss)(params, row[0][None], row[1][None]), squared=True)

    count = len(targets)
    one = jax.lax.map(square, (contexts, targets), batch_size=64).mean()
    whole = optax.tree.norm(jax.grad(loss)(params, contexts, targets), squared=True)
    return ((one - whole) / (1 - 1 / count)) / ((count * whole - one) / (count - 1))


def noise_on_the_way(text: jax.Array, batch: int, rate: float, steps: float) -> list[dict[str, float]]:
    """The loss and the noise scale at eight places of a run to the target."""
    params, measured, found = initial(), rows(text, jax.random.key(1), MEASURED_ROWS), []
    for place in range(8):
        params = train(text, params, jax.random.key(place), rate, batch=batch, steps=round(steps / 8))
        found.append({"loss": float(measure(params, *measured)), "noise_scale": float(noise_scale(params, *measured))})
    return found


def main() -> None:
    """Write the file."""
    text = jnp.asarray(np.frombuffer(TEXT.read_bytes(), np.uint8).astype(np.int32))
    runs: list[dict[str, Any]] = []
    rate = 0.03125
    for batch in BATCHES:
        rate, steps = tuned(text, batch, rate)
        runs.append({"batch": batch, "rate": rate, "steps": round(steps, 1), "rows": round(steps * batch)})
        print(runs[-1], flush=True)  # noqa: T201
    middle = next(run for run in runs if run["batch"] == 128)
    noise = noise_on_the_way(text, 128, middle["rate"], middle["steps"])
    found = {"target_loss": TARGET_LOSS, "jax": jax.__version__, "runs": runs, "noise": noise}
    HERE.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
