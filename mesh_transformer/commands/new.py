"""Write the config of a new run: answer five questions, on the terminal or with options, and get a config that fits.

The size of the model and its tokens follow from Hoffmann et al. 2022, the batch from McCandlish et al. 2018. The mesh,
the microbatch and the recomputation are those that preflight finds fastest (docs/runs.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mesh_transformer.errors import UserError
from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, ask for the answers that are missing, and write the config."""
    given = _parser().parse_args(arguments)
    # imported late, so that --help takes little time
    from mesh_transformer.runtime.new import answers

    answers.check_name(given.name, given.overwrite)
    texts = {name: value for name in answers.QUESTIONS if (value := getattr(given, name)) is not None}
    for name, value in texts.items():
        answers.QUESTIONS[name].check(value)
    missing = [name for name in answers.QUESTIONS if name not in texts]
    if missing and not sys.stdin.isatty():
        options = " ".join(f"--{name} {name.upper()}" for name in missing)
        raise UserError(f"no terminal to ask on: give {options}")
    texts |= {name: answers.ask(name) for name in missing}
    user_answers = answers.Answers(
        goal=answers.goal(texts["goal"]),
        model=texts["model"].strip(),
        data=texts["data"].strip(),
        hardware=answers.hardware(texts["hardware"]),
        budget=answers.budget(texts["budget"]),
    )
    cli.starting()
    from mesh_transformer.runtime.new import command

    return command.run(user_answers, texts, cli.fields(command.NewOptions, given))


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
    add("--hardware", metavar="NAME", help="a TPU slice such as v3-8; a100, h100 or h200; or cpu, this machine")
    add("--budget", metavar="B", help="hours of training, such as 6h, 30min or 2d, or tokens, such as 500M or 2B")
    add("--price", type=float, metavar="P", help="price of a chip for an hour, for the cost of the run")
    cli.add_overwrite(parser)
    return parser
