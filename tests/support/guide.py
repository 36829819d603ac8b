"""scripts/guide.py, called as a reader calls it."""

import os
import subprocess
import sys
from pathlib import Path

# what tests/conftest.py sets; a reader's page chooses its own devices and compiles as JAX does by default
OF_THE_TESTS = ("XLA_FLAGS", "JAX_PLATFORMS", "PJRT_NPROC", "JAX_NUMPY_", "JAX_COMPILATION_", "JAX_PERSISTENT_")


def guide(repo: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/guide.py in the environment of a reader."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_THE_TESTS)}
    return subprocess.run(
        [sys.executable, "scripts/guide.py", *arguments],
        cwd=repo, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
