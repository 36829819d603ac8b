"""Write the config of a new run: answer five questions, on the terminal or with options, and get a config that fits.

The size of the model and its tokens follow from Hoffmann et al. 2022, the batch from McCandlish et al. 2018. The mesh,
the microbatch and the recomputation are those that preflight finds fastest (docs/runs.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mesh_transformer.accelerators import GPUS
from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, ask for the answers that are missing, and write the config."""
    given = _parser().parse_args(arguments)
    # imported late, so that --help takes little time
    from mesh_transformer.runtime.new.interview import Interview

    interview = Interview.of(given)
    with interview.kept():
        interview.complete()
        cli.starting()
        from mesh_transformer.runtime.new import command

        return command.run(interview, cli.fields(command.NewOptions, given))


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "name",
        nargs="?",
        default="my_run",
        metavar="NAME",
        help="name of the run (default: %(default)s); writes NAME.json",
    )
    add("--goal", choices=["train", "tune"], help="train a new model, or tune one that is trained already")
    add(
        "--model",
        metavar="MODEL",
        help="train: a family such as llama, whose size follows from the budget; a size such as 125M (of the family "
        "gptj); or both, llama:125M. tune: a checkpoint of any format, hf://ORG/NAME, or 6B, which is GPT-J-6B",
    )
    add(
        "--data",
        metavar="FILE",
        help="a .txt file, an index of record files, a .tfrecords file, or the folder of a data set (prepare)",
    )
    add("--hardware", metavar="NAME", help=f"a TPU slice such as v3-8; {', '.join(GPUS)}; or cpu, this machine")
    add("--budget", metavar="B", help="hours of training, such as 6h, 30min or 2d, or tokens, such as 500M or 2B")
    add("--price", type=float, metavar="P", help="price of a chip for an hour, for the cost of the run")
    cli.add_overwrite(parser)
    return parser
