"""`python -m mesh_transformer NAME ...` is `mesh-transformer NAME ...`."""

from __future__ import annotations

import sys

from mesh_transformer import environment

with environment.interruptible():
    from mesh_transformer.commands import main
    from mesh_transformer.runtime import cli


def run() -> None:
    """The console script."""
    # doctor says what is wrong with an old Python
    cli.run(main, any_python=sys.argv[1:2] == ["doctor"])


if __name__ == "__main__":
    run()
