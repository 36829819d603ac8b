"""The last line of a training run. Whoever has the command line says it: a driver for its workers."""

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mesh_transformer.config.load import is_ignored


class Ending(NamedTuple):
    """How a run ended, in JSON values.

    Args:
        code: the exit code: 0, or 128 + the signal that stopped it.
        begun: the step after which it began.
        val_loss: the newest loss on each validation set, in nats per token; empty if none was measured.
        checkpoint: the folder of the newest step.
    """

    code: int
    begun: int
    step: int
    total: int
    val_loss: Mapping[str, float]
    checkpoint: str

    def told(self, config_path: str, overrides: Sequence[str]) -> str:
        """The line, with the command that samples from the run of this config and these `overrides`."""
        if self.code:
            return f"saved after step {self.step:,} of {self.total:,}; the same command goes on from there"
        given = [part for change in overrides if not is_ignored(change) for part in ("--set", change)]
        if ignored := [change.removeprefix("-") for change in overrides if is_ignored(change)]:
            given += ["--ignore-keys", ",".join(ignored)]
        sample = shlex.join(["python", "device_sample.py", "--config", config_path, *given])
        after = f"checkpoint {self.checkpoint}; sample: {sample}"
        if self.begun >= self.total:
            return (
                f"the run is complete: step {self.step:,} of {self.total:,}; to train on, raise the steps: "
                f"--set optimizer.total_steps=N; {after}"
            )
        return f"reached step {self.step:,} of {self.total:,}{self._losses()}; {after}"

    def _losses(self) -> str:
        several = len(self.val_loss) > 1
        losses = [f"{loss:.2f}" + f" ({name})" * several for name, loss in self.val_loss.items()]
        return f", val loss {', '.join(losses)}" if losses else ""
