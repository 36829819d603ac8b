"""Tell whether a training run fits a TPU slice or a GPU that is not attached, and predict its speed and its cost."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from mesh_transformer.accelerators import GPUS
from mesh_transformer.runtime import cli
from mesh_transformer.stop_signals import TERMINATIONS

# set in the process that compiles
_COMPILES = "MESH_TRANSFORMER_COMPILES"
# without a folder for programs, each process would end at the same program
_MOST_PROCESSES = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, compile and report."""
    given = _parser().parse_args(arguments)
    if given.search and _COMPILES not in os.environ:
        return _watched(sys.argv[1:] if arguments is None else arguments)
    cli.starting(given.config_path, given.overrides)
    from mesh_transformer.runtime.preflight import command

    options = cli.fields(command.PreflightOptions, given)
    return command.run(given.config_path, given.overrides, options)


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__)
    _add_model(parser)
    cli.add_model_path(parser, "the checkpoint that tells the model of a config without the group model")
    parser.add_argument(
        "--tpu",
        action="append",
        default=[],
        metavar="SLICE",
        help="type of a TPU slice, such as v3-32, or of several, such as 2xv5e-16; may be repeated (default: v3-8, "
        "v4-8, v5e-8 and v6e-8)",
    )
    parser.add_argument(
        "--gpu",
        action="append",
        default=[],
        metavar="NAME",
        help=f"one GPU: {', '.join(GPUS)}; may be repeated",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="look for the fastest mesh, microbatch and recomputation with the same sequences of a step",
    )
    parser.add_argument(
        "--compile",
        type=int,
        default=4,
        metavar="N",
        help="with --search: programs to compile for each slice; the others are judged by a formula (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--serve", action="store_true", help="the programs of device_serve.py instead of the training step"
    )
    parser.add_argument(
        "--slots",
        type=int,
        default=8,
        metavar="N",
        help="with --serve: sequences that are computed at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="steps of the run, for days and cost (default: optimizer.total_steps)"
    )
    parser.add_argument("--price", type=float, metavar="P", help="price of a chip for an hour, for the cost of the run")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each program")
    parser.add_argument(
        "--plot",
        default="preflight.png",
        metavar="PNG",
        help="picture of memory and time; empty: none (default: %(default)s)",
    )
    parser.add_argument(
        "--op-table",
        metavar="DIR",
        help="write a table of the operations of each compiled program to DIR, with their estimated times",
    )
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add --model, --seq and --batch: a model without a config."""
    parser.add_argument(
        "--model",
        type=cli.checkpoint_path,
        metavar="MODEL",
        help="judge this model without a config: a checkpoint, hf://ORG/NAME, a config.json or a folder with one; no "
        "weights are read",
    )
    parser.add_argument(
        "--seq", type=int, metavar="N", help="with --model: tokens of a sequence, and the context of a server"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="with --model: sequences of a step")


def _watched(arguments: Sequence[str]) -> int:
    """Run a search in a process that the compiler may end. A process after it goes on: the program at which it ended
    is refused, and those before it are on disk."""
    command = [sys.executable, "-m", "mesh_transformer", "preflight", *arguments]
    environment = {**os.environ, _COMPILES: "1"}
    for number in range(_MOST_PROCESSES):
        # a process that is begun anew writes all lines again
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            before = {each: signal.signal(each, lambda got, _: process.send_signal(got)) for each in TERMINATIONS}
            assert process.stdout is not None
            output = process.stdout.read()
        for each, handler in before.items():
            signal.signal(each, handler)
        if process.returncode != -signal.SIGABRT:
            break
        if number < _MOST_PROCESSES - 1:
            sys.stderr.write("the compiler ended the process: another process compiles the other programs\n")
    sys.stdout.buffer.write(output)
    sys.stdout.flush()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
