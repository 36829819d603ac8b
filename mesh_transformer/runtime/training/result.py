"""The result of a training run, and its summary, which the command or the driver logs as the last line."""

import posixpath
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from mesh_transformer.environment import command_line


class TrainingResult(NamedTuple):
    """The result of a run, as JSON values.

    Args:
        code: the exit code: 0, or 128 + the number of the signal that stopped the run.
        start_step: the step after which the run started or resumed.
        val_loss: the newest loss on each validation set, in nats per token. Empty without a validation.
        checkpoint: the folder of the newest step.
    """

    code: int
    start_step: int
    step: int
    total_steps: int
    val_loss: Mapping[str, float]
    checkpoint: str

    def summary(self) -> str:
        """One line with the progress, the checkpoint and a command that samples from it, on any devices."""
        if self.code:
            return f"saved after step {self.step:,} of {self.total_steps:,}; the same command resumes from there"
        run = posixpath.dirname(self.checkpoint)
        sample = f"{command_line('sample')} {shlex.join(['--ckpt', run, '--prompt', 'Hello'])}"
        after = f"checkpoint {self.checkpoint}; sample: {sample}"
        if self.start_step >= self.total_steps:
            return (
                f"the run is complete: step {self.step:,} of {self.total_steps:,}; to continue, increase the steps: "
                f"--set optimizer.total_steps=N; {after}"
            )
        # a run that no signal has stopped
        ends = ", where the training data ends" if self.step < self.total_steps else ""
        return f"reached step {self.step:,} of {self.total_steps:,}{ends}{self._losses()}; {after}"

    def _losses(self) -> str:
        several = len(self.val_loss) > 1
        losses = [f"{loss:.2f}" + f" ({name})" * several for name, loss in self.val_loss.items()]
        return f", val loss {', '.join(losses)}" if losses else ""
