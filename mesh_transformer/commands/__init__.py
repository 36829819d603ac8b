"""The commands: `mesh-transformer NAME ...`, `python -m mesh_transformer NAME ...`, and the scripts of a checkout.

A command is a module of this folder with `main`, and a line in `COMMANDS`. Modules import what is heavy after they have
read the arguments, so that `--help` takes little time.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shlex
import sys
from collections.abc import Sequence

from mesh_transformer.environment import PROGRAM
from mesh_transformer.errors import UserError, did_you_mean
from mesh_transformer.runtime import cli

COMMANDS = {
    "new": "write the config of a run that fits a machine and a budget, from five answers",
    "train": "train or fine-tune on the devices of this machine, or of all processes of a job",
    "drive": "train on a TPU slice, a Ray cluster or several processes, from this driver",
    "sample": "sample from a model",
    "serve": "serve a model over HTTP",
    "evaluate": "evaluate a model on tasks of lm-evaluation-harness",
    "prepare": "tokenize a corpus into record files, on one or many machines",
    "records": "tokenize text into record files, with the options of 2021",
    "tokenizer": "train a tokenizer",
    "preflight": "tell whether a run fits a TPU slice or a GPU, and predict its speed and cost",
    "reshard": "convert a checkpoint to another number of shards",
    "slim": "write only the parameters of a checkpoint",
    "to-hf": "convert a checkpoint to a Hugging Face folder",
    "from-hf": "convert a Hugging Face folder to a checkpoint",
    "doctor": "say what this machine has and lacks for the commands, with the mend of each fault",
    "tpu": "create, list and delete Cloud TPU VMs, and run commands on their hosts",
}
"""What each command does. The command `to-hf` is the function `main` of the module `to_hf`."""


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Run the command that the first argument names, and return its exit code; None: 0. Without arguments it prints the
    help.

    Raises:
        UserError: there is no such command.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    _skip_completed_name()
    if words and words[0] in COMMANDS:
        return run(words[0], words[1:])
    parser = cli.Parser(PROGRAM, description="Train, evaluate and serve transformers, sharded over any device mesh.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, meaning in COMMANDS.items():
        commands.add_parser(name, help=meaning)
    if "_ARGCOMPLETE" not in os.environ and not words:
        parser.print_help()
        return None
    if words and not words[0].startswith("-"):
        known = f"the commands are {', '.join(COMMANDS)}"
        raise UserError(f"no such command: {words[0]}{did_you_mean(words[0], COMMANDS)}; {known}; see {PROGRAM} --help")
    parser.parse_args(words)
    return None


def run(name: str, arguments: Sequence[str]) -> int | None:
    """Run a command of COMMANDS, and return its exit code; None: 0."""
    # argparse reads the name of the program here, and so does environment.command
    sys.argv = [f"{PROGRAM} {name}", *arguments]
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    return module.main(arguments)


def version() -> str:
    """The version of the installed package."""
    try:
        return importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return "of a checkout that is not installed"


def _skip_completed_name() -> None:
    """Let the parser of a command complete the words after its name, for the shell's request to argcomplete."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        words = shlex.split(os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])])
    except (KeyError, ValueError):
        return
    if len(words) > 2 and words[1] in COMMANDS:
        os.environ["_ARGCOMPLETE"] = "2"
        run(words[1], [])
