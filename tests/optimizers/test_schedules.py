"""Schedules of the learning rate against plain float64."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.optimizers import OPTIMIZERS
from mesh_transformer.optimizers.schedules import FIELDS, SCHEDULES
from mesh_transformer.train.optimizer import schedule_of

MODEL = {"family": "gptj", "layers": 1, "d_model": 16, "n_heads": 2, "n_vocab": 256, "seq": 8, "pe_rotary_dims": 4}
RATES = {"lr": 3e-4, "end_lr": 7e-6}
RUNS = {
    "short": {**RATES, "warmup_steps": 20, "total_steps": 500},
    "long": {"lr": 1.2e-4, "end_lr": 1.2e-5, "warmup_steps": 3000, "total_steps": 350_000},
    "no warm-up, and fractions": {**RATES, "warmup_steps": 0, "total_steps": 301},
}
ANNEAL = {"short": 300, "long": 300_000, "no warm-up, and fractions": 251.5}
DECAY = {"short": None, "long": 40_000, "no warm-up, and fractions": 77.25}


def config_of(schedule: str, run: str, **fields: Any) -> Any:
    given = {"schedule": schedule, **RUNS[run], "anneal_steps": ANNEAL[run], "decay_steps": DECAY[run], **fields}
    unread = FIELDS - SCHEDULES[schedule].reads
    return OPTIMIZERS["adam"](**{name: value for name, value in given.items() if name not in unread})


def by_definition(schedule: str, run: str, steps: np.ndarray, decay: str) -> np.ndarray:
    """The rate at each step, as the page says it, in float64."""
    lr, end_lr, warmup, total = RUNS[run].values()
    end_lr = lr if schedule == "constant" else end_lr
    annealed = np.clip((steps - warmup) / ANNEAL[run], 0, 1)
    length = DECAY[run] or total / 10
    last = np.clip((steps - (total - length)) / length, 0, 1)
    shares = {
        "cosine": (1 - np.cos(np.pi * annealed)) / 2,
        "linear": annealed,
        "constant": 0 * annealed,
        "wsd": np.sqrt(last) if decay == "sqrt" else last,
    }
    after = lr + (end_lr - lr) * shares[schedule]
    return np.where(steps < warmup, lr * steps / max(warmup, 1), after)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("schedule", "decay"), [*((name, "linear") for name in SCHEDULES), ("wsd", "sqrt")])
def test_a_schedule_is_its_definition(schedule: str, decay: str, run: str) -> None:
    """At every step, and after the end. Three roundings of float32 are 1.8e-7; the argument of the cosine has two more,
    which are at most 1e-7 of the rate."""
    fields = {"decay": decay} if schedule == "wsd" else {}
    config, steps = config_of(schedule, run, **fields), np.arange(RUNS[run]["total_steps"] + 100)
    rates = np.broadcast_to(jax.jit(lambda step: schedule_of(config)(step))(steps), steps.shape)
    assert rates.dtype == np.float32
    expected = by_definition(schedule, run, steps.astype(np.float64), decay)
    tolerance = 3e-7 if schedule == "cosine" else 2e-7
    np.testing.assert_allclose(rates, expected, rtol=0, atol=tolerance * config.lr)
    # the oracle is not flat where the schedule is not
    assert (np.ptp(expected) > 0.9 * config.lr) == (schedule != "constant" or config.warmup_steps > 0)


def test_the_cosine_of_earlier_runs_is_equal_in_bits() -> None:
    config = config_of("cosine", "long")

    def before(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warmup = jnp.minimum(step / config.warmup_steps, 1.0)
        annealed = jnp.clip((step - config.warmup_steps) / config.anneal_steps, 0.0, 1.0)
        return warmup * config.lr - (config.lr - config.end_lr) * 0.5 * (1 - jnp.cos(jnp.pi * annealed))

    steps = np.arange(0, 320_000, 7)
    np.testing.assert_array_equal(jax.jit(lambda step: schedule_of(config)(step))(steps), jax.jit(before)(steps))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": "constant", "end_lr": 0}, "optimizer.end_lr is given, but optimizer.schedule constant does not"),
        ({"decay_steps": 5}, "decay_steps is given, but optimizer.schedule cosine .*: remove it .*, or set .* to wsd"),
        ({"schedule": "wsd", "anneal_steps": 5}, "anneal_steps is given, .* wsd does not .* to cosine or linear"),
        # also a value that is the default
        ({"schedule": "linear", "decay": "linear"}, "optimizer.decay is given, but optimizer.schedule linear does not"),
        (
            {"schedule": "wsd", "warmup_steps": 15, "decay_steps": 6, "total_steps": 20},
            "warmup_steps 15 and optimizer.decay_steps 6 are longer than optimizer.total_steps 20: lower one",
        ),
        # the default of decay_steps is a tenth
        ({"schedule": "wsd", "warmup_steps": 19, "total_steps": 20}, "warmup_steps 19 and optimizer.decay_steps 2 are"),
        ({"schedule": "step"}, "optimizer.schedule"),
    ],
)
def test_what_a_schedule_does_not_read_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_config({"model": MODEL, "optimizer": given})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_written_config_is_read_again(schedule: str) -> None:
    """As the driver sends it to its workers: without the fields that the schedule does not read."""
    config = parse_config({"model": MODEL, "optimizer": {"schedule": schedule, "lr": 1e-3}})
    written = json.loads(json.dumps(config.model_dump(mode="json")))
    assert FIELDS & written["optimizer"].keys() == SCHEDULES[schedule].reads
    assert parse_config(written) == config


def test_another_name_of_a_schedule_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lr_scheduler_type.*did you mean.*optimizer\.schedule"):
        parse_config({"model": MODEL}, ["optimizer.lr_scheduler_type=linear"])
