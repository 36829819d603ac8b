"""`mesh-transformer new` after its questions: plan the run, write its config, and say what comes next."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import jax

from mesh_transformer import logs, platforms
from mesh_transformer.config import load_config
from mesh_transformer.errors import UserError, options_to_add
from mesh_transformer.logs import log
from mesh_transformer.runtime.new import machine, text
from mesh_transformer.runtime.new.interview import Interview
from mesh_transformer.runtime.new.plan import Refusal, RunPlan, make


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


def run(interview: Interview, options: NewOptions) -> int:
    """Write the config. A question whose answer does not fit is asked again, if there is a terminal.

    Raises:
        UserError: as in `plan.make`, or the file cannot be written.
    """
    logs.set_up()
    if options.price is not None and not (math.isfinite(options.price) and options.price >= 0):
        raise UserError(f"--price {options.price}: expected the price of a chip for an hour, 0 or more")
    # programs are compiled for devices that are not attached: the devices of this machine stay free
    jax.config.update("jax_platforms", "cpu")
    with platforms.CompileCache():
        plan = _plan(interview, options.name)
        path = f"{options.name}.json"
        _write(path, text.config_text(plan, interview.command, options.price), options.overwrite)
    # check the file as a run reads it
    load_config(path)
    lines = [*text.summary(plan, options.price), f"\n{path} is written. Next:", *text.next_commands(plan, path)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _plan(interview: Interview, name: str) -> RunPlan:
    while True:
        answers = interview.answers()
        log.info("looking for the fastest way to compute a step on %s", answers.hardware)
        try:
            return make(answers, machine.find(answers.hardware), name)
        except Refusal as refusal:
            if not interview.interactive:
                raise
            sys.stdout.write(f"{refusal}\n")
            interview.ask(refusal.question)


def _write(path: str, content: str, overwrite: bool) -> None:
    try:
        with Path(path).open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError as error:
        raise UserError(f"{path} exists: give another NAME, or {options_to_add('--overwrite')}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
