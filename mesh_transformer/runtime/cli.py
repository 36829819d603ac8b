"""What every entry point does: the shared arguments, and errors as one line with an exit code."""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from mesh_transformer.errors import RunError, UserError

T = TypeVar("T")
ANY_FORM = (
    "a run's folder (its newest step is taken) or a step_N folder, native or of the original program, or a Hugging Face "
    "folder; local or gs://"
)


def parser(description: str, *, needs_config: bool = False) -> argparse.ArgumentParser:
    """A parser with --config, --set and --ignore-keys; what the last two give is `overrides` (config/load.py).

    Args:
        needs_config: whether a checkpoint's own model does not do instead of --config.
    """
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--config",
        required=needs_config,
        dest="config_path",
        metavar="FILE",
        help="config file, grouped or classic (docs/config.md)"
        + ("" if needs_config else "; not needed for a checkpoint that knows its model"),
    )
    made.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="group.key=value",
        help="change one value of the config; may be given several times",
    )
    made.add_argument(
        "--ignore-keys",
        type=lambda keys: [f"-{key.strip()}" for key in keys.split(",")],
        action="extend",
        default=[],
        dest="overrides",
        metavar="KEY,...",
        help="leave these keys of the config file out, such as those that only another program reads",
    )
    return made


def fields(kind: type[T], arguments: argparse.Namespace) -> T:
    """The dataclass `kind` of the options that are named like its fields."""
    return kind(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(kind)})  # type: ignore[arg-type]


def add_checkpoint(made: argparse.ArgumentParser, flag: str = "--ckpt", *, required: bool = False) -> None:
    """The checkpoint to read, of any form."""
    default = "" if required else " (default: the run of the config)"
    made.add_argument(flag, dest="checkpoint", required=required, metavar="DIR", help=f"{ANY_FORM}{default}")


def add_tuning(made: argparse.ArgumentParser) -> None:
    """--tune-model-path and --fresh-opt."""
    made.add_argument(
        "--tune-model-path",
        metavar="DIR",
        help="start at step 0 from the weights of this checkpoint: a native one, one of the original program or a Hugging "
        "Face folder; local or gs://",
    )
    made.add_argument(
        "--fresh-opt",
        action="store_true",
        help="with --tune-model-path: do not load its optimizer state; start with a fresh one",
    )


def add_step_output(made: argparse.ArgumentParser, flag: str, form: str, *, required: bool = False) -> None:
    """What a command that writes a step takes: its place (`flag`), --format (default `form`), --overwrite."""
    made.add_argument(
        flag,
        dest="output",
        metavar="DIR",
        help="native: the root, in which step_N is made; classic: the step folder itself, such as gptj/step_383500; "
        "local or gs://",
        required=required,
    )
    made.add_argument(
        "--format",
        dest="form",
        choices=["native", "classic"],
        default=form,
        help="form of the checkpoint to write (default: %(default)s)",
    )
    add_overwrite(made)


def add_overwrite(made: argparse.ArgumentParser) -> None:
    """--overwrite."""
    made.add_argument("--overwrite", action="store_true", help="replace an existing output")


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run an entry point. Exit code 0, or its own; with one line why: 2 for bad input, 1 for a failed run, 130 after
    Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # until a run saves first
    try:
        code = main() or 0
    except (UserError, RunError) as error:
        _ignore_half_made()
        sys.stderr.write(f"error: {error}\n")
        code = 2 if isinstance(error, UserError) else 1
        if "jax" in sys.modules:  # a command that does without it is in no job
            from mesh_transformer import platforms

            platforms.leave_job(code)
    except BrokenPipeError:
        code = 1
    except KeyboardInterrupt:
        _ignore_half_made()
        sys.stderr.write("interrupted\n")
        code = 128 + signal.SIGINT
    sys.exit(code)


def _ignore_half_made() -> None:
    """What was only half made complains when it is deleted."""
    sys.unraisablehook = lambda _: None
