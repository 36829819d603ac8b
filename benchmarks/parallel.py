"""Pipeline and context parallelism on forced CPU devices: the time of a step by schedule and microbatches, beside the
time that the bubble predicts; and the memory of a step by context mode, as the sequence grows with the devices.

    python benchmarks/parallel.py [--plot parallelism.png]

All devices share the cores of this machine, and an idle stage computes too. So the time of a step is that of all ticks.
"""

import argparse
import os
import time
from typing import Any

from common import OwnStep, child, median, parse, parser, report, say

from mesh_transformer import cpu_devices

STAGES = 4
MICROBATCHES = (4, 8, 16, 32)
SCHEDULES = {"1f1b": 1, "interleaved": 2}
MODES = ("zigzag", "ring", "ulysses", "gather")
CP = (2, 4, 8)
POSITIONS = 256
MODEL = {"layers": 8, "d_model": 128, "n_heads": 8, "n_vocab": 512, "seq": 256, "pe_rotary_dims": 8}


def main() -> None:
    """Run both parts in children, report, and draw."""
    made = parser(__doc__, config=None)
    made.add_argument("--plot", metavar="PNG", help="write a chart of both parts")
    arguments = parse(made)
    result = {"pipeline": child(arguments, worker="pipeline"), "context": child(arguments, worker="context")}
    report(result)
    if arguments.plot:
        plot(result, arguments.plot)


def pipeline(arguments: argparse.Namespace) -> dict[str, Any]:
    """The median seconds of a step by schedule and microbatches, in turn, and the predicted seconds.

    The prediction has one constant, the time of a tick with one round: that of 1f1b with the most microbatches.
    """
    _force_devices(STAGES)
    from mesh_transformer.parallel.pipeline import Ticks

    steps = {}
    for name in SCHEDULES:
        for microbatches in MICROBATCHES:
            step = OwnStep(_config(MODEL, microbatches, pp=STAGES, dp=1, schedule=name))
            step()
            steps[name, microbatches] = step
            say(f"compiled {name} with {microbatches} microbatches")
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for _ in range(arguments.rounds):
        for key, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[key].append(time.perf_counter() - began)
    measured = {key: median(values) for key, values in seconds.items()}
    most = Ticks(STAGES, 1, MICROBATCHES[-1])
    tick = measured["1f1b", MICROBATCHES[-1]] / most.forward_ticks
    rows = []
    for (name, microbatches), value in measured.items():
        ticks = Ticks(STAGES, SCHEDULES[name], microbatches)
        predicted = tick * ticks.forward_ticks / ticks.rounds
        rows.append(
            {
                "schedule": name,
                "microbatches": microbatches,
                "step_s": value,
                "predicted_s": median([predicted]),
                "ratio": median([value / predicted]),
                "bubble": median([ticks.bubble]),
            }
        )
    return {"stages": STAGES, "rows": rows}


def context(_: argparse.Namespace) -> dict[str, Any]:
    """MiB of the temporaries of a device by mode and devices, with equal positions on each device. Nothing runs."""
    _force_devices(max(CP))
    import jax

    from mesh_transformer.models.placement import Placement
    from mesh_transformer.train.step import TrainProgram, compile_step

    rows = []
    for cp in CP:
        for mode in MODES:
            model = {**MODEL, "layers": 2, "seq": POSITIONS * cp}
            config = _config(model, 2, cp=cp, dp=1, context_mode=mode)
            program = TrainProgram(Placement.of(config, jax.devices()[:cp]), config)
            memory: Any = compile_step(program, 2, 1).memory_analysis()
            rows.append({"mode": mode, "cp": cp, "seq": model["seq"], "mib": memory.temp_size_in_bytes / 2**20})
            say(f"compiled {mode} with cp {cp}")
    return {"positions_of_a_device": POSITIONS, "rows": rows}


def _force_devices(count: int) -> None:
    """Make CPU devices, before JAX is imported."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    cpu_devices.give_threads()


def _config(model: dict[str, Any], microbatches: int, **mesh: Any) -> Any:
    from mesh_transformer.config import parse_config

    optimizer = {"total_steps": 100, "anneal_steps": 100, "gradient_accumulation_steps": microbatches}
    groups = {"mesh": mesh, "data": {"per_replica_batch": 1}, "compute": {"remat": "full", "dtype": "float32"}}
    return parse_config({"model": model, "optimizer": optimizer, **groups}, [])


def plot(result: dict[str, Any], path: str) -> None:
    """Draw the time of a step by microbatches, and the memory by length of the sequence."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, color in zip(SCHEDULES, ("#1f77b4", "#d62728"), strict=True):
        rows = [row for row in result["pipeline"]["rows"] if row["schedule"] == name]
        x = [row["microbatches"] for row in rows]
        # without a bubble a step takes as long for each microbatch as for any other
        left.plot(x, [1e3 * row["step_s"] / row["microbatches"] for row in rows], "o", color=color, label=name)
        predicted = [1e3 * row["predicted_s"] / row["microbatches"] for row in rows]
        left.plot(x, predicted, "--", color=color, label=f"{name}, predicted")
    left.set(xlabel="microbatches of a step", ylabel="ms for each microbatch", xscale="log", ylim=(0, None))
    left.set_xticks(MICROBATCHES, [str(n) for n in MICROBATCHES])
    left.set_title(f"pipeline of {STAGES} stages", fontsize=10)
    for mode in MODES:
        rows = [row for row in result["context"]["rows"] if row["mode"] == mode]
        right.plot([row["seq"] for row in rows], [row["mib"] for row in rows], "o-", label=mode)
    right.set(xlabel="positions of a sequence", ylabel="MiB of temporaries on a device", ylim=(0, None))
    right.set_title(f"{POSITIONS} positions on each device", fontsize=10)
    for axes in (left, right):
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    say(f"plot: {path}")


if __name__ == "__main__":
    main()
