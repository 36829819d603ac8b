"""Predicted speed of published training runs beside the published figures: the table of docs/preflight.md.

    python benchmarks/published.py                       # all rows; 20 minutes on two cores if nothing is kept
    python benchmarks/published.py gptj_v3-8 maxtext_16B # some rows

This needs jax[tpu], in an environment of its own (pip install -e '.[tpu]'), and no TPU. A row is compiled and estimated
by the code of preflight.py, which keeps compiled programs. The output is one JSON object on standard output, and a line
for each row on standard error. `ratio` is predicted time divided by published time.

MaxText computes attention with a fused kernel. Its row is compiled without one, and also has the figure `with_kernel`:
the time of the operations that such a kernel replaces is taken out, and the time of a kernel at an assumed share of the
peak is put in.
"""

import argparse
import re
from typing import Any, Literal, NamedTuple

import common
import jax

from mesh_transformer.config import Config, load_config
from mesh_transformer.errors import UserError
from mesh_transformer.estimate.prediction import Prediction, predict_training
from mesh_transformer.estimate.programs import compile_for, default_folder
from mesh_transformer.estimate.target import Target, tpu_target
from mesh_transformer.estimate.timeline import Timeline
from mesh_transformer.models.placement import Placement
from mesh_transformer.models.stack import LAYER_LOOP
from mesh_transformer.ops.attend.causal import ATTEND
from mesh_transformer.runtime import cli
from mesh_transformer.train.step import TrainProgram, lower_step

CONFIG = common.REPO / "configs/6B_finetune_v3-8.json"
FSDP_256 = ("mesh.tp=1", "mesh.fsdp=256", "optimizer.gradient_accumulation_steps=1")
ORIGINAL = "the original program's log and README"
LEVANTER = "Levanter 1.0 release post, table of MFU on a v3-256; its batch is not published: 4 sequences a core"
MAXTEXT = "MaxText's README, table of v5e; 6 sequences a chip"
# Queries and keys of a block of the kernel: causal attention computes whole blocks on the diagonal.
BLOCK = 512
# Products of the size of the logits: queries and keys, weights and values; the backward pass computes the first again
# and has four others (Dao 2023, arXiv:2307.08691, section 2.3).
FORWARD, BACKWARD = 2, 5


class Row(NamedTuple):
    """A published run, as changes of CONFIG."""

    slice: str
    overrides: tuple[str, ...]
    metric: Literal["tokens_per_s", "step_s", "mfu"]
    published: float
    source: str
    fused_kernel: bool = False


ROWS = {
    "gptj_v3-8": Row("v3-8", (), "tokens_per_s", 5000, ORIGINAL),
    "gptj_v3-32": Row("v3-32", ("optimizer.gradient_accumulation_steps=8",), "step_s", 3.373, ORIGINAL),
    "levanter_6.7B": Row(
        "v3-256",
        (*FSDP_256, "data.per_replica_batch=4", "model.layers=32", "model.n_heads=32", "model.n_vocab=50257"),
        "mfu",
        0.473,
        LEVANTER,
    ),
    "levanter_13B": Row(
        "v3-256",
        (
            *FSDP_256,
            "data.per_replica_batch=4",
            "model.layers=40",
            "model.d_model=5120",
            "model.n_heads=40",
            "model.n_vocab=50257",
        ),
        "mfu",
        0.544,
        LEVANTER,
    ),
    "maxtext_16B": Row(
        "v5e-256",
        (
            *FSDP_256,
            "data.per_replica_batch=6",
            "model.layers=32",
            "model.d_model=6144",
            "model.n_heads=24",
            "compute.attention=plain",
        ),
        "mfu",
        0.611,
        MAXTEXT,
        fused_kernel=True,
    ),
}


def main() -> None:
    """Parse the arguments, compile, report."""
    made = common.parser(__doc__, config=None, rounds=None)
    made.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)} (default: all)")
    made.add_argument(
        "--kernel-share",
        type=float,
        default=0.55,
        metavar="S",
        help="share of the peak that a fused kernel of attention is assumed to reach (default: %(default)s)",
    )
    arguments = made.parse_args()
    _check(arguments)
    # programs are compiled for devices that are not attached
    jax.config.update("jax_platforms", "cpu")
    found = {}
    for name in arguments.rows or ROWS:
        found[name] = measure(ROWS[name], arguments.kernel_share)
        common.say(f"{name}: {found[name]}")
    common.report({"rows": found})


def _check(arguments: argparse.Namespace) -> None:
    for name in arguments.rows:
        if name not in ROWS:
            raise UserError(f"unknown row {name!r}: expected one of {', '.join(ROWS)}")
    if not 0 < arguments.kernel_share <= 1:
        raise UserError(f"--kernel-share {arguments.kernel_share}: expected a share of the peak, above 0 and up to 1")


def measure(row: Row, kernel_share: float) -> dict[str, Any]:
    """The predicted and the published figure of a row, and their ratio."""
    config, target = load_config(str(CONFIG), row.overrides), tpu_target(row.slice)
    predicted = predict_training(config, target, row.overrides, default_folder())
    if predicted.step_s is None:
        raise UserError(f"{row.slice}: the program does not fit: {predicted.reason}")
    compared = _compared(row, predicted, predicted.step_s)
    shown = {
        "slice": row.slice,
        "metric": row.metric,
        "published": row.published,
        **compared,
        "step_s": _rounded(predicted.step_s),
        "source": row.source,
    }
    if row.fused_kernel:
        replaced, kernel = attend_seconds(config, target), kernel_seconds(config, target, kernel_share)
        shown["with_kernel"] = {
            "assumed": f"a fused kernel of attention at {kernel_share:.0%} of the peak",
            "replaced_s": _rounded(replaced),
            "kernel_s": _rounded(kernel),
            **_compared(row, predicted, predicted.step_s - replaced + kernel),
        }
    return shown


def _compared(row: Row, predicted: Prediction, step_s: float) -> dict[str, float]:
    """The metric if a step takes so long, and the ratio of times."""
    whole = getattr(predicted, row.metric)
    value = step_s if row.metric == "step_s" else whole * predicted.step_s / step_s
    ratio = value / row.published if row.metric == "step_s" else row.published / value
    return {"predicted": _rounded(value), "ratio": _rounded(ratio)}


def attend_seconds(config: Config, target: Target) -> float:
    """Predicted seconds of the operations that a fused kernel replaces: ops/attend, forward and backward."""
    program = TrainProgram(Placement.of(config, target.devices()), config)
    batch = config.microbatch(config.check_devices(target.n_devices))
    lowered = lower_step(program, config.optimizer.gradient_accumulation_steps, batch)
    compiled = compile_for(lowered, target, default_folder())
    timeline = Timeline(compiled.hlo, target.accelerator, {LAYER_LOOP: config.model.layers})
    names = timeline.module.instructions
    spent = timeline.estimate().spent.items()
    seconds = sum(one.seconds for name, one in spent if re.search(rf"\b{ATTEND}\b", names[name].op_name))
    if not seconds:
        raise UserError(f"{default_folder()} has a program of an older version: delete this folder")
    return seconds


def kernel_seconds(config: Config, target: Target, share: float) -> float:
    """Seconds of a step in a fused kernel of causal attention that reaches this share of the peak, on one device. The
    forward pass is computed twice, as with compute.remat full."""
    sequences = config.microbatch(config.check_devices(target.n_devices)) / target.n_devices
    attention, seq = config.model.decoder().attentions[0], config.seq
    pairs = seq * seq / 2 * (1 + BLOCK / seq)
    product = 2 * sequences * attention.heads * attention.head_dim * pairs
    flops = config.model.layers * (2 * FORWARD + BACKWARD) * product * config.optimizer.gradient_accumulation_steps
    return flops / (share * 1e12 * target.accelerator.peak_tflops)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    cli.run(main)
