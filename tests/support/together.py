"""Programs that run at the same time, such as the processes of one job."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def outputs_of(
    commands: Sequence[Sequence[str]],
    *,
    timeout_s: float,
    environments: Sequence[Mapping[str, str]] | None = None,
    cwd: Path | None = None,
) -> list[str]:
    """Start all commands, wait for each, and return what they print, standard output and errors together.

    Args:
        environments: one for each command; None: the environment of this process.
    """
    children = [
        subprocess.Popen(command, env=environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, environment in zip(commands, environments or [None] * len(commands), strict=True)
    ]
    try:
        outputs = [child.communicate(timeout=timeout_s)[0] for child in children]
    finally:
        # one that has failed may leave the others waiting for it
        for child in children:
            child.kill()
    for child, output in zip(children, outputs, strict=True):
        assert child.returncode == 0, output[-6000:]
    return outputs
