"""Parallel training of models of one's own. Run one with `python -m examples.NAME`; docs/library.md describes the
library.

This file runs before an example imports jax: it gives jax eight CPU devices, unless the environment names others.
"""

import os
import sys
from types import TracebackType

from mesh_transformer import environment
from mesh_transformer.errors import UserError

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# CPU devices that wait in a collective block threads, and by default there are only as many as devices
os.environ.setdefault("PJRT_NPROC", "32")


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show Ctrl-C, an absent package and a wrong Python as one line, also while an example imports jax."""
    if kind is KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        # the normal exit may crash, because XLA's threads still compute
        os._exit(130)
    message = str(error) if isinstance(error, UserError) else None
    if isinstance(error, ModuleNotFoundError):
        message = environment.not_installed(error)
    if message is None:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)


sys.excepthook = _show
environment.handle_interrupts()
environment.check_python()
