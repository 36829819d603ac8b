"""The options that commands share, and errors as one line with an exit code."""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from mesh_transformer.errors import RunError, UserError

T = TypeVar("T")
ANY_FORM = (
    "folder of the checkpoint: a run (its newest step) or a step_N folder, in native or classic format, or a Hugging Face "
    "folder; local or gs://"
)


def parser(description: str, *, needs_config: bool = False) -> argparse.ArgumentParser:
    """A parser with --config, --set and --ignore-keys. The last two make up `overrides` (config/load.py).

    Args:
        needs_config: whether --config is required. Otherwise a checkpoint may name the model.
    """
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--config",
        required=needs_config,
        dest="config_path",
        metavar="FILE",
        help="config file, grouped or classic (docs/config.md)"
        + ("" if needs_config else "; a checkpoint that records its config does not need one"),
    )
    made.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="group.key=value",
        help="set one value of the config; may be repeated",
    )
    made.add_argument(
        "--ignore-keys",
        type=lambda keys: [f"-{key.strip()}" for key in keys.split(",")],
        action="extend",
        default=[],
        dest="overrides",
        metavar="KEY,...",
        help="ignore these keys of the config file, such as those that only another program reads",
    )
    return made


def fields(kind: type[T], arguments: argparse.Namespace) -> T:
    """An instance of the dataclass `kind`, from the options with the names of its fields."""
    return kind(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(kind)})  # type: ignore[arg-type]


def add_checkpoint(made: argparse.ArgumentParser, flag: str = "--ckpt", *, required: bool = False) -> None:
    """Add the option for the checkpoint to read, of any format."""
    default = "" if required else " (default: the run of the config)"
    made.add_argument(flag, dest="checkpoint", required=required, metavar="DIR", help=f"{ANY_FORM}{default}")


def add_tuning(made: argparse.ArgumentParser) -> None:
    """Add --tune-model-path and --fresh-opt."""
    made.add_argument(
        "--tune-model-path",
        metavar="DIR",
        help="start at step 0 from the weights of this checkpoint: native, classic or a Hugging Face folder; local or gs://",
    )
    made.add_argument(
        "--fresh-opt",
        action="store_true",
        help="with --tune-model-path: start with fresh optimizer state instead of loading it",
    )


def parse_tuned(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of a parser with the options of `add_tuning`.

    Raises:
        UserError: --fresh-opt is given without --tune-model-path.
    """
    arguments = made.parse_args()
    if arguments.fresh_opt and not arguments.tune_model_path:
        raise UserError("--fresh-opt ignores the optimizer state of --tune-model-path: give that option too")
    return arguments


def add_step_output(made: argparse.ArgumentParser, flag: str, format: str, *, required: bool = False) -> None:
    """Add the options of a command that writes a checkpoint: its path (`flag`), --format (default `format`),
    --overwrite."""
    made.add_argument(
        flag,
        dest="output",
        metavar="DIR",
        help="output folder, local or gs://. native: the parent of the new step_N folder; classic: the step folder itself, "
        "such as gptj/step_383500",
        required=required,
    )
    made.add_argument(
        "--format",
        dest="format",
        choices=["native", "classic"],
        default=format,
        help="format of the checkpoint to write (default: %(default)s)",
    )
    add_overwrite(made)


def add_overwrite(made: argparse.ArgumentParser) -> None:
    """Add --overwrite."""
    made.add_argument("--overwrite", action="store_true", help="replace an existing output")


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run an entry point and exit with its code: 0 by default, 2 for bad input, 1 for a failed run, 130 after Ctrl-C.

    An error is printed as one line.
    """
    # a training run replaces this handler
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        code = main() or 0
    except (UserError, RunError) as error:
        _silence_deletions()
        sys.stderr.write(f"error: {error}\n")
        code = 2 if isinstance(error, UserError) else 1
        # a command without jax is not part of a job
        if "jax" in sys.modules:
            from mesh_transformer import platforms

            platforms.leave_job(code)
    except BrokenPipeError:
        code = 1
    except KeyboardInterrupt:
        _silence_deletions()
        sys.stderr.write("interrupted\n")
        code = 128 + signal.SIGINT
    sys.exit(code)


def _silence_deletions() -> None:
    """Objects that were not fully constructed raise when they are deleted; do not print that."""
    sys.unraisablehook = lambda _: None
