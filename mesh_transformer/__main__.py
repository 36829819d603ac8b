"""`python -m mesh_transformer NAME ...` is `mesh-transformer NAME ...`."""

from __future__ import annotations

from mesh_transformer.commands import main
from mesh_transformer.runtime import cli


def run() -> None:
    """The console script."""
    cli.run(main)


if __name__ == "__main__":
    run()
