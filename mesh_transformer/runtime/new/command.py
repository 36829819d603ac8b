"""`mesh-transformer new` after its questions: plan the run, write its config, and say what comes next."""

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import jax

from mesh_transformer import logs
from mesh_transformer.config import load_config
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log
from mesh_transformer.runtime.new import machine, text
from mesh_transformer.runtime.new.answers import Answers
from mesh_transformer.runtime.new.plan import make


@dataclass(frozen=True)
class NewOptions:
    """The options of the command beside its five answers.

    Args:
        name: the name of the run. Its config is NAME.json, in the current folder.
        price: the price of a chip for an hour; None: unknown.
        overwrite: whether the config may exist.
    """

    name: str
    price: float | None
    overwrite: bool


def run(answers: Answers, texts: dict[str, str], options: NewOptions) -> int:
    """Write the config.

    Args:
        texts: the answers as they were given, by the name of their option.

    Raises:
        UserError: as in `plan.make`, or the file cannot be written.
    """
    logs.set_up()
    if options.price is not None and not (math.isfinite(options.price) and options.price >= 0):
        raise UserError(f"--price {options.price}: expected the price of a chip for an hour, 0 or more")
    # programs are compiled for devices that are not attached: the devices of this machine stay free
    jax.config.update("jax_platforms", "cpu")
    log.info("looking for the fastest way to compute a step on %s", answers.hardware)
    plan = make(answers, machine.find(answers.hardware), options.name)
    flags = [part for name, given in texts.items() for part in (f"--{name}", given)]
    price = [] if options.price is None else ["--price", f"{options.price:g}"]
    command = shlex.join(["mesh-transformer", "new", options.name, *flags, *price])
    path = f"{options.name}.json"
    _write(path, text.config_text(plan, command, options.price), options.overwrite)
    # check the file as a run reads it
    load_config(path)
    lines = [*text.summary(plan, options.price), f"\n{path} is written. Next:", *text.next_commands(plan, path)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _write(path: str, content: str, overwrite: bool) -> None:
    try:
        with Path(path).open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError as error:
        raise UserError(f"{path} exists: give another NAME, or --overwrite") from error
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
