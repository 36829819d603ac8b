"""--new: the run's folder is deleted, and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable

from mesh_transformer import files
from mesh_transformer.config import Config
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log
from mesh_transformer.runtime.run_lock import RunLock

_OURS = re.compile(
    r"step_\d+(\.orbax-checkpoint-tmp.*)?|set_aside|metrics\.jsonl(\.tmp)?|loss\.png(\.tmp)?|run_id|run\.lock|tensorboard|wandb|"
    r"\.shared-.*"
)


def delete_old_run(config: Config, *, yes: bool, before: Callable[[], None] = lambda: None) -> None:
    """Delete what a run has left in checkpoint.model_dir, after asking; nothing is there: nothing to do.

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
    if not yes and not _agreed(
        f"--new: delete {root} with {steps} checkpoint(s) and all its metrics? [y/N] "
    ):
        raise UserError(f"nothing was deleted: without --new the run in {root} goes on")
    before()
    folder = config.checkpoint.model_dir
    with RunLock(folder) if os.path.isdir(folder) else contextlib.nullcontext():
        files.remove_tree(root)
    log.info("deleted: %s", root)


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError(f"{question.removesuffix(' [y/N] ')} There is no terminal to ask on: say --yes")
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
