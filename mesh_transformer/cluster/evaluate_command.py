"""The work of eval_harness.py on a cluster."""

import dataclasses
from collections.abc import Sequence

from mesh_transformer import logs
from mesh_transformer.cluster.base import Job
from mesh_transformer.cluster.place import Place
from mesh_transformer.runtime.configs import config_for
from mesh_transformer.runtime.evals import command


def run(config_path: str | None, overrides: Sequence[str], place: Place, options: command.Options) -> int:
    """Evaluate on a place's devices. Tables and report are written by this process; the workers read the checkpoint and the
    tasks' data.

    Raises:
        UserError: an argument, the config, the place, a task or the checkpoint cannot be used.
        RunError: the workers crash again and again.
    """
    logs.set_up()
    config = config_for(config_path, overrides, options.checkpoint)
    arguments = {**dataclasses.asdict(options), "tasks": list(options.tasks), "output": None}
    code, result = place.run(Job.of("evaluate", config, **arguments), config)
    if result is not None:
        command.show(command.Evaluation(**result), options.output)
    return code
