"""Bounds of the speed and the memory of programs that libtpu compiles, beside what the code reaches now.

    python benchmarks/bounds.py                        # all rows; two hours on two cores if nothing is kept
    python benchmarks/bounds.py v3-8 decode_8          # some rows

This needs jax[tpu], in an environment of its own (pip install -e '.[tpu]'), and no TPU. A row is one call of
preflight.py, which keeps compiled programs. Standard output has one JSON object for each bound: the row, the figure,
its value, the bound, and whether the value keeps it. A value may exceed its bound by 2%. The exit code is 1 if a value
does not keep its bound.

Figures: step_s, predicted seconds of a step; token_ms, predicted milliseconds for a token of each slot; mfu, model
FLOPs utilization; peak_gib, memory of a device.
"""

import json
import subprocess
from typing import Any, NamedTuple

import common

from mesh_transformer.errors import UserError
from mesh_transformer.estimate.serving import NAMES
from mesh_transformer.infer.programs import MAX_STEPS
from mesh_transformer.runtime import cli

# of a bound that a value may exceed
TOLERANCE = 0.02
# figures that should be large
LEAST = ("mfu",)

ONE_MICROBATCH = "optimizer.gradient_accumulation_steps=1"
SPLIT = ("mesh.shard_activations=true", ONE_MICROBATCH)
FSDP_4_TP_2 = ("mesh.fsdp=4", "mesh.tp=2", "data.per_replica_batch=4", *SPLIT)
V3_256 = ("data.per_replica_batch=2", ONE_MICROBATCH)
GPT_40B = ("model.layers=48", "model.d_model=8192", "model.n_heads=64", "model.d_head=128", "model.d_ff=32768")
EXPERTS = ("mesh.pp=1", "mesh.tp=1", "mesh.fsdp=16", "mesh.dp=2", "data.per_replica_batch=8", ONE_MICROBATCH)
SERVE = ("--serve", "--slots")


class Row(NamedTuple):
    """A program, or the best one of a search.

    Args:
        bounds: by figure.
        step_s: the value of the code as it is; None: a search, whose programs are other rows. A test compares it
            (tests/runtime/preflight/test_preflight_bounds.py).
        config: its name in configs/.
        options: of preflight.py.
    """

    slice: str
    overrides: tuple[str, ...]
    bounds: dict[str, float]
    step_s: float | None
    config: str = "6B_finetune_v3-8"
    options: tuple[str, ...] = ()


ROWS = {
    # tensor parallelism alone
    "v3-8_tp": Row("v3-8", (), {}, 5.869),
    "v4-8_tp": Row("v4-8", ("mesh.tp=4",), {}, 3.281),
    "v5e-8_tp": Row("v5e-8", (), {}, 2.597),
    # replicas of tensor-parallel devices
    "v3-8": Row(
        "v3-8", (*FSDP_4_TP_2, "compute.remat=save_attn"), {"step_s": 4.21, "mfu": 0.599, "peak_gib": 14.29}, 4.074
    ),
    "v5e-8_full": Row("v5e-8", (*FSDP_4_TP_2, "compute.remat=full"), {"step_s": 1.685}, None),
    "v5e-8": Row("v5e-8", (*FSDP_4_TP_2, "compute.remat=save_attn"), {"step_s": 1.587, "mfu": 0.496}, 1.527),
    "v4-8": Row(
        "v4-8",
        ("mesh.fsdp=2", "mesh.tp=2", "mesh.overlap_tp=false", "data.per_replica_batch=8", *SPLIT)
        + ("compute.remat=save_attn",),
        {"step_s": 2.269, "mfu": 0.497},
        2.165,
    ),
    "v3-256": Row(
        "v3-256",
        (*V3_256, "mesh.fsdp=8", "mesh.shard_activations=true", "compute.remat=none"),
        {"step_s": 0.657, "mfu": 0.48},
        0.644,
    ),
    "v3-512_40B": Row("v3-512", (*GPT_40B, "mesh.fsdp=64", *SPLIT), {"peak_gib": 15.48}, None),
    "v5e-16_llama_8B": Row("v5e-16", (), {"step_s": 1.057, "mfu": 0.475}, 1.025, "llama_8B"),
    "v4-64_experts": Row("v4-64", (*EXPERTS, "compute.remat=save_attn"), {"mfu": 0.20}, 0.577, "moe_1B_A300M"),
    # what the search finds
    "search_v3-8": Row("v3-8", (), {"step_s": 4.21, "mfu": 0.599}, None, options=("--search",)),
    "search_v4-8": Row("v4-8", ("mesh.tp=4",), {"mfu": 0.497}, None, options=("--search",)),
    "search_v5e-8": Row("v5e-8", (), {"mfu": 0.496}, None, options=("--search",)),
    "search_v3-256": Row("v3-256", V3_256, {"step_s": 0.66, "mfu": 0.48}, None, options=("--search",)),
    # the decode program of the server
    "decode_1": Row("v5e-8", ("mesh.tp=8",), {"token_ms": 8.6}, None, options=(*SERVE, "1")),
    "decode_8": Row("v5e-8", ("mesh.tp=8",), {"token_ms": 8.8}, None, options=(*SERVE, "8")),
    "decode_64": Row("v5e-8", ("mesh.tp=8",), {"token_ms": 31.8}, None, options=(*SERVE, "64")),
}


def main() -> int:
    """Parse the arguments, compile, report."""
    made = common.parser(__doc__, config=None, rounds=None)
    made.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)} (default: all)")
    arguments = made.parse_args()
    for name in arguments.rows:
        if name not in ROWS:
            raise UserError(f"unknown row {name!r}: expected one of {', '.join(ROWS)}")
    kept = True
    for name in arguments.rows or ROWS:
        for line in judge(name, ROWS[name], measure(ROWS[name])):
            common.emit(line)
            kept &= line["pass"]
    return 0 if kept else 1


def measure(row: Row) -> dict[str, Any] | None:
    """The best program of a row: the object that preflight.py prints. None: nothing fits.

    Raises:
        UserError: preflight.py failed, or refuses an option.
    """
    config = str(common.REPO / f"configs/{row.config}.json")
    options = ("--tpu", row.slice, "--json", "--plot=", *row.options)
    command = common.command(str(common.REPO / "preflight.py"), config, row.overrides, *options)
    done = subprocess.run(command, cwd=common.REPO, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        raise UserError(f"exit code {done.returncode}: {' '.join(command[1:])}")
    found = map(json.loads, done.stdout.splitlines())
    return next((one for one in found if one["best"]), None)


def judge(name: str, row: Row, predicted: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A line for each bound of a row. A row without bounds has a line with its time."""
    values = dict(predicted or {})
    if values.get("program") == NAMES[1]:
        values["token_ms"] = 1000 * values["step_s"] / MAX_STEPS
    lines = []
    for figure, bound in (row.bounds or {"step_s": row.step_s}).items():
        value = values.get(figure)
        line = {"row": name, "figure": figure, "value": value, "bound": bound, "pass": _keeps(figure, value, bound)}
        lines.append({**line, "set": values["set"]} if values.get("set") else line)
    return lines


def _keeps(figure: str, value: float | None, bound: float | None) -> bool:
    if value is None or bound is None:
        return False
    return value * (1 + TOLERANCE) >= bound if figure in LEAST else value <= bound * (1 + TOLERANCE)


if __name__ == "__main__":
    cli.run(main)
