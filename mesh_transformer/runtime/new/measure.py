"""The time of training steps on this CPU, from a few real ones on random weights and tokens."""

import os
import statistics
import time

import jax
import numpy as np

from mesh_transformer import platforms
from mesh_transformer.config import Config
from mesh_transformer.models.placement import Placement
from mesh_transformer.sequences import Sequences
from mesh_transformer.spec.flops import flops_per_token
from mesh_transformer.train.step import TrainProgram

# a measured step takes about as long, s: it has as many sequences, or a part of one
_STEP_S, _FEWEST_TOKENS = 1.0, 64
# steps that are measured, as far as they take no longer together, s
_STEPS, _MOST_S = 10, 5.0
# programs that take a smaller part of the machine do not change its speed much
_BUSY = 1.5


def seconds_per_sequence(config: Config, flops: float) -> float:
    """The time of a sequence of a training step, s: the median of a few steps, after one.

    Args:
        config: of the run. Its microbatch is the largest that is measured.
        flops: a guess of the speed, FLOP/s.
    """
    expected = _flops(config, config.seq) / flops
    most = config.data.batch_size or 1
    sequences, seq = min(most, _power(_STEP_S / expected)), config.seq
    if expected > _STEP_S:
        seq = min(seq, max(_FEWEST_TOKENS, _power(seq * _STEP_S / expected)))
    changes = {
        "compute": platforms.resolve(config.compute, "cpu"),
        "data": config.data.model_copy(update={"batch_size": sequences, "seq": seq}),
        "optimizer": config.optimizer.model_copy(update={"gradient_accumulation_steps": 1}),
    }
    seconds = _step_seconds(config.model_copy(update=changes)) / sequences
    return seconds * _flops(config, config.seq) / _flops(config, seq)


def _step_seconds(config: Config) -> float:
    program = TrainProgram(Placement.of(config, jax.devices("cpu")[:1]), config)
    state = program.init(jax.random.key(0))
    shape = (1, config.data.batch_size or 1, config.seq + 1)
    batch = Sequences(np.random.default_rng(0).integers(0, config.model.n_vocab, shape, np.int32))
    seconds: list[float] = []
    # the first one compiles
    while len(seconds) <= _STEPS and sum(seconds[1:]) < _MOST_S:
        began = time.perf_counter()
        state, metrics = program.train_step(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _flops(config: Config, seq: int) -> float:
    """The operations of a sequence of so many tokens."""
    return seq * flops_per_token(config.decoder, seq)


def _power(value: float) -> int:
    """The largest power of two up to `value`, at least 1."""
    return 1 << max(0, int(value).bit_length() - 1)


def other_load() -> str:
    """A note about other programs on this machine; empty: they take little of it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f", beside other programs (load {load:.1f} on {cores} cores)" if load > _BUSY * cores else ""
