"""The work of train.py, with what its options --version and --new do, and of eval_harness.py on a cluster."""

import argparse
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mesh_transformer import files, logs
from mesh_transformer.cluster.base import Job
from mesh_transformer.cluster.driver.place import Place
from mesh_transformer.config import Config, load_config, parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log
from mesh_transformer.runtime.training.ending import Ending
from mesh_transformer.runtime.training.run_folder import RunLock

_OURS = re.compile(
    r"step_\d+(\.orbax-checkpoint-tmp.*)?|set_aside|metrics\.jsonl(\.tmp)?|loss\.png(\.tmp)?|run_id|run\.lock|tensorboard|wandb|"
    r"\.shared-.*"
)


def train(given: argparse.Namespace) -> int:
    """Train as train.py's arguments say. Returns the process's exit code.

    Raises:
        UserError: the arguments do not go together, or the config, the place, the data or a checkpoint cannot be used.
        RunError: the loss is not finite, or the workers crash again and again.
    """
    place = Place.of(given)
    source = {"tune_model_path": given.tune_model_path, "fresh_opt": given.fresh_opt}
    logs.set_up()
    config = as_version(load_config(given.config_path, given.overrides), given.version)
    if given.new:
        delete_old_run(config, yes=given.yes, before=lambda: place.end_workers(config))
    code, ended = place.run(Job.of("train", config, **source), config)
    if ended is not None:
        log.info("%s", Ending(**ended).told(given.config_path, given.overrides))
    elif code:
        log.info("stopped; the same command goes on from the newest checkpoint")
    return code


def evaluate(config_path: str | None, overrides: Sequence[str], place: Place, options: Any) -> int:
    """Evaluate on a place's devices, with the `options` of `runtime.evaluation.command`. Tables and report are written by this
    process; the workers read the checkpoint and the tasks' data.

    Raises:
        UserError: an argument, the config, the place, a task or the checkpoint cannot be used.
        RunError: the workers crash again and again.
    """
    from mesh_transformer.runtime.evaluation import command
    from mesh_transformer.runtime.session.weights import config_for

    logs.set_up()
    config = config_for(config_path, overrides, options.checkpoint)
    arguments = {**dataclasses.asdict(options), "tasks": list(options.tasks), "output": None}
    code, result = place.run(Job.of("evaluate", config, **arguments), config)
    if result is not None:
        command.show(command.Evaluation(**result), options.output)
    return code


def as_version(config: Config, version: int) -> Config:
    """The same run with the mesh of `version`: 1 splits matrices over the cores of a replica (tp), 2 splits weights and optimizer
    state over them (fsdp). A step trains on as many sequences as before.

    In version 2 each core takes whole sequences, so microbatches grow and there are fewer of them.

    Raises:
        UserError: the sequences of a step do not divide over the cores.
    """
    cores = config.mesh.tp
    if version == 1 or cores == 1:
        return config
    raw = config.model_dump(mode="json")
    raw["mesh"] |= {"fsdp": config.mesh.fsdp * cores, "tp": 1}
    if config.data.batch_size is None:
        each, microbatches = config.data.per_replica_batch or 1, config.optimizer.gradient_accumulation_steps
        core_batch = each // cores if each % cores == 0 else 1
        if each * microbatches % (cores * core_batch):
            raise UserError(
                f"--version 2 gives each of {cores} cores sequences of its own, and a step of {each} (data."
                f"per_replica_batch) x {microbatches} (optimizer.gradient_accumulation_steps) does not divide by {cores}"
            )
        raw["data"]["per_replica_batch"] = core_batch
        raw["optimizer"]["gradient_accumulation_steps"] = each * microbatches // (cores * core_batch)
    return parse_config(raw)


def delete_old_run(config: Config, *, yes: bool, before: Callable[[], None] = lambda: None) -> None:
    """--new: delete what a run has left in checkpoint.model_dir, after asking; nothing is there: nothing to do.

    Args:
        yes: do not ask.
        before: called when all is settled, such as to end who still writes there.

    Raises:
        UserError: the folder holds other things too or is in use, the answer was no, or there is no terminal to ask on.
    """
    root = config.checkpoint.root
    names = files.list_dir(root)
    if not names:
        return
    strange = [name for name in names if not _OURS.fullmatch(name)]
    if strange:
        raise UserError(
            f"--new deletes the folder of a run, and {root} holds other things too ({', '.join(strange[:5])}): name "
            f"another checkpoint.model_dir, or delete what you do not need yourself"
        )
    steps = sum(name.startswith("step_") for name in names)
    if not yes:
        question = f"--new: delete {root} with {steps} checkpoint(s) and all its metrics?"
        if not sys.stdin.isatty():
            raise UserError(f"{question} There is no terminal to ask on: say --yes")
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise UserError(f"nothing was deleted: without --new the run in {root} goes on")
    before()
    folder = config.checkpoint.model_dir
    with RunLock(folder) if os.path.isdir(folder) else contextlib.nullcontext():
        files.remove_tree(root)
    log.info("deleted: %s", root)
