"""The work of train.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mesh_transformer import logs
from mesh_transformer.cluster.base import Job
from mesh_transformer.cluster.new_run import delete_old_run
from mesh_transformer.cluster.place import Place
from mesh_transformer.cluster.version import as_version
from mesh_transformer.config import load_config
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log
from mesh_transformer.runtime.ending import Ending


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line's options besides the config and the place.

    Args:
        new: delete what the run has left, and begin afresh.
        yes: do not ask before that.
        version: of the original program: how a replica is split over its cores.
        tune_model_path, fresh_opt: as `runtime.start.Source`.

    Raises:
        UserError: they do not go together.
    """

    new: bool = False
    yes: bool = False
    version: int = 1
    tune_model_path: str | None = None
    fresh_opt: bool = False

    def __post_init__(self) -> None:
        if self.fresh_opt and not self.tune_model_path:
            raise UserError("--fresh-opt drops the Adam moments of --tune-model-path: give that too")


def run(config_path: str, overrides: Sequence[str], place: Place, options: Options) -> int:
    """Train as train.py's arguments say. Returns the process's exit code.

    Raises:
        UserError: the config, the place, the data or a checkpoint cannot be used.
        RunError: the loss is not finite, or the workers crash again and again.
    """
    logs.set_up()
    config = as_version(load_config(config_path, overrides), options.version)
    if options.new:
        delete_old_run(config, yes=options.yes, before=lambda: place.end_workers(config))
    source = {"tune_model_path": options.tune_model_path, "fresh_opt": options.fresh_opt}
    code, ended = place.run(Job.of("train", config, **source), config)
    if ended is not None:
        log.info("%s", Ending(**ended).told(config_path, overrides))
    elif code:
        log.info("stopped; the same command goes on from the newest checkpoint")
    return code
