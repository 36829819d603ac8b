"""The commands train.py, with its options --version and --new, and eval_harness.py on a cluster."""

import argparse
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mesh_transformer import files, hub, logs
from mesh_transformer.cluster.base import Job
from mesh_transformer.cluster.driver.compute_target import ComputeTarget
from mesh_transformer.cluster.driver.fit import check_fit
from mesh_transformer.config import Config, parse_config
from mesh_transformer.errors import UserError, plural
from mesh_transformer.logs import log
from mesh_transformer.runtime.training.config import training_config
from mesh_transformer.runtime.training.result import TrainingResult
from mesh_transformer.runtime.training.run_folder import RunLock

# the files of a run
_RUN_FILES = re.compile(
    r"step_\d+(\.orbax-checkpoint-tmp.*)?|set_aside|(metrics|experts)\.jsonl(\.tmp)?|(loss|experts)\.png(\.tmp)?|"
    r"run_id|run\.lock|tensorboard|profile|wandb|\.shared-.*"
)


def train(given: argparse.Namespace) -> int:
    """Train with the arguments of train.py. Returns the exit code of the process.

    Raises:
        UserError: arguments contradict each other, or the config, the compute target, the data or a checkpoint is
            invalid.
        RunError: the loss is not finite, or the workers crash repeatedly.
    """
    target = ComputeTarget.of(given)
    # each host looks the name up, perhaps again after a failure: all must find the same commit
    tuned = None if given.tune_model_path is None else hub.pinned(given.tune_model_path)
    adapter = None if given.adapter is None else hub.pinned(given.adapter)
    source = {"tune_model_path": tuned, "fresh_opt": given.fresh_opt, "adapter": adapter}
    logs.set_up()
    found = training_config(given.config_path, given.overrides, tuned, adapter, new=given.new)
    config = as_version(found, given.version)
    if target.tpu is not None and not given.no_preflight:
        check_fit(config, target.size(config))
    if given.new:
        delete_old_run(config, yes=given.yes, before=lambda: target.end_workers(config))
    code, result = target.run(Job.of("train", config, **source), config)
    if result is not None:
        log.info("%s", TrainingResult(**result).summary())
    elif code:
        log.info("stopped; the same command resumes from the newest checkpoint")
    return code


def evaluate(config_path: str | None, overrides: Sequence[str], target: ComputeTarget, options: Any) -> int:
    """Evaluate on a compute target, with the `options` of `runtime.evaluation.command`.

    The workers read the checkpoint and the tasks' data. This process writes tables and report.

    Raises:
        UserError: an argument, the config, the compute target, a task or the checkpoint is invalid.
        RunError: the workers crash repeatedly.
    """
    from mesh_transformer.runtime.evaluation import command
    from mesh_transformer.runtime.session.weights import config_for

    logs.set_up()
    config, opened = config_for(config_path, overrides, options.checkpoint, options.base, options.adapter)
    places = {
        name: None if (path := getattr(options, name)) is None else hub.pinned(path)
        for name in ("checkpoint", "base", "adapter")
    }
    if options.checkpoint and opened.has_base and not opened.base_is_given:
        # the base that adapters name: all workers read the same one
        places["base"] = opened.base.place
    arguments = {
        **dataclasses.asdict(options),
        **places,
        "tasks": list(options.tasks),
        "output": None,
    }
    code, result = target.run(Job.of("evaluate", config, **arguments), config)
    if result is not None:
        command.show(command.Evaluation(**result), options.output)
    return code


def as_version(config: Config, version: int) -> Config:
    """The config with the mesh of `version`. A step has the same number of sequences.

    Version 1 splits matrices over the cores of a replica (tp). Version 2 splits weights and optimizer state over them
    (fsdp). In version 2 each core processes whole sequences, so there are fewer and larger microbatches.

    Raises:
        UserError: the sequences of a step do not divide by the number of cores.
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
                f"--version 2 gives each of the {cores} cores (mesh.tp) whole sequences, but {each} "
                f"(data.per_replica_batch) x {microbatches} (optimizer.gradient_accumulation_steps) sequences do not "
                f"divide by {cores}: change one of them"
            )
        raw["data"]["per_replica_batch"] = core_batch
        raw["optimizer"]["gradient_accumulation_steps"] = each * microbatches // (cores * core_batch)
    return parse_config(raw)


def delete_old_run(config: Config, *, yes: bool, before: Callable[[], None] = lambda: None) -> None:
    """--new: delete the run in checkpoint.model_dir after a confirmation. Without such a folder it does nothing.

    Args:
        yes: skip the confirmation.
        before: called after the confirmation, such as to end processes that still write there.

    Raises:
        UserError: the folder has other files or is in use, the answer is no, or there is no terminal for the question.
    """
    root = config.checkpoint.root
    names = files.list_dir(root)
    if not names:
        return
    foreign = [name for name in names if not _RUN_FILES.fullmatch(name)]
    if foreign:
        raise UserError(
            f"--new deletes the folder of a run, but {root} has other files too ({', '.join(foreign[:5])}): choose "
            f"another checkpoint.model_dir, or move these files away"
        )
    steps = sum(name.startswith("step_") for name in names)
    if not yes:
        question = f"--new: delete {root} with {plural(steps, 'checkpoint')} and all its metrics?"
        if not sys.stdin.isatty():
            raise UserError(f"{question} There is no terminal for the answer: give --yes")
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise UserError(f"nothing was deleted: without --new the run in {root} is resumed")
    before()
    folder = config.checkpoint.model_dir
    with RunLock(folder) if os.path.isdir(folder) else contextlib.nullcontext():
        files.remove_tree(root)
    log.info("deleted: %s", root)
