"""What every entry point does: the shared arguments, and errors as one line with an exit code."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from mesh_transformer.errors import RunError, UserError


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with --config and --set."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--config", required=True, help="config file, grouped or classic (docs/config.md)")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="group.key=value",
        help="change one value of the config; may be given several times",
    )
    return made


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run an entry point. Exit code 0, or its own; 2 for bad input and 1 for a failed run, with one line why."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # until a run saves first
    try:
        code = main() or 0
    except UserError as error:
        code = _complain(error, 2)
    except RunError as error:
        code = _complain(error, 1)
    except BrokenPipeError:
        code = 1
    sys.exit(code)


def _complain(error: Exception, code: int) -> int:
    sys.stderr.write(f"error: {error}\n")
    return code
