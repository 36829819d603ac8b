"""The options that commands share, and errors as one line with an exit code."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from mesh_transformer import cpu_devices, environment
from mesh_transformer.errors import RunError, UserError, did_you_mean, out_of_memory, shown
from mesh_transformer.stop_signals import TERMINATIONS, outlive_terminal

T = TypeVar("T")
# a search for garbage after so many new objects; the default of CPython 3.11 is 700
_NEW_OBJECTS = 5000
ANY_FORMAT = (
    "the checkpoint: the folder of a run (its newest step) or of a step_N, in native or classic format, or a Hugging "
    "Face folder; local or gs://; or a model on the Hugging Face hub, hf://ORG/NAME or hf://ORG/NAME@REVISION"
)


class Parser(argparse.ArgumentParser):
    """Parses the arguments of a command. A mistake is one line; argparse alone prints its whole usage before it.

    A shell completes the options of a command if `register-python-argcomplete` has set it up.
    """

    # the words of `parse_args`
    _given: Sequence[str] = ()

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """The arguments, or the end of the process with the words that complete them."""
        if "_ARGCOMPLETE" in os.environ:
            import argcomplete

            argcomplete.autocomplete(self)
        self._given = sys.argv[1:] if args is None else args
        return super().parse_args(args, namespace)

    def _misspelt(self) -> str:
        """A message about an option that does not exist and has nearly the name of another one; empty: there is none.
        It is better than argparse's, which tells first which required options are missing."""
        known = set(re.findall(r"--[\w-]+", self.format_help()))
        for word in itertools.takewhile(lambda word: word != "--", self._given):
            name = word.partition("=")[0]
            is_name = re.fullmatch(r"--[\w-]+", name) and not any(option.startswith(name) for option in known)
            if is_name and (suggestion := did_you_mean(name, known)):
                return f"no such option: {name}{suggestion}"
        return ""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {shown(self._misspelt() or message)}; see {self.prog} --help\n")


def parser(description: str, *, needs_config: bool = False) -> argparse.ArgumentParser:
    """A parser with --config, --set and --ignore-keys. The last two make up `overrides` (config/load.py).

    Args:
        needs_config: whether --config is required. Otherwise a checkpoint may name the model.
    """
    parser = Parser(description=description)
    parser.add_argument(
        "--config",
        required=needs_config,
        dest="config_path",
        metavar="FILE",
        help="config file, grouped or classic (docs/config.md), or the name of a shipped one, such as tiny_shakespeare"
        + ("" if needs_config else "; a checkpoint that records its model does not need one"),
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="group.key=value",
        help="set one value of the config; may be repeated",
    )
    parser.add_argument(
        "--ignore-keys",
        type=lambda keys: [f"-{key.strip()}" for key in keys.split(",")],
        action="extend",
        default=[],
        dest="overrides",
        metavar="KEY,...",
        help="ignore these keys of the config file, such as those that only another program reads",
    )
    return parser


def fields(kind: type[T], arguments: argparse.Namespace) -> T:
    """An instance of the dataclass `kind`, from the options with the names of its fields. The others keep their
    defaults."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(arguments).items() if name in names})


def add_checkpoint(parser: argparse.ArgumentParser, flag: str = "--ckpt", *, required: bool = False) -> None:
    """Add the option for the checkpoint to read, of any format."""
    default = "" if required else " (default: the run of the config)"
    parser.add_argument(
        flag, dest="checkpoint", type=checkpoint_path, required=required, metavar="DIR", help=f"{ANY_FORMAT}{default}"
    )
    parser.add_argument(
        "--base",
        type=checkpoint_path,
        metavar="DIR",
        help="where the base of a run with adapters (the group lora) is now (default: where the run read it)",
    )
    add_adapter(parser, "the model gets these adapters: a folder of PEFT, or a run with the group lora")


def add_adapter(parser: argparse.ArgumentParser, help: str) -> None:
    """Add --adapter."""
    parser.add_argument(
        "--adapter", type=checkpoint_path, metavar="DIR", help=f"{help}; local, gs:// or hf://ORG/NAME[@REVISION]"
    )


def add_generation_config(parser: argparse.ArgumentParser) -> None:
    """Add the option for the origin of the sampling options that are not given."""
    parser.add_argument(
        "--generation-config",
        type=lambda name: "none" if name == "vllm" else name,
        choices=("auto", "none"),
        default="auto",
        help="sampling options that are not given: auto takes temperature, top_p, top_k and repetition_penalty of the "
        "model's generation_config.json, if it has one; none, or vllm, takes none of them (default: %(default)s)",
    )


def add_corpus(parser: argparse.ArgumentParser) -> None:
    """Add --input, --column and --on-error: documents to read (dataset/inputs.py)."""
    from mesh_transformer.dataset.options import PrepareOptions

    add = parser.add_argument
    add(
        "--input",
        action="append",
        required=True,
        metavar="X[=SHARE]",
        help="a file, folder, glob or gs:// prefix of .txt, .jsonl, .csv (each plain or with .gz, .xz, .zst), .parquet "
        "or .tar files, or a data set of the Hugging Face hub, hf://datasets/ORG/NAME[:SPLIT]; X=0.3 takes this share "
        "of its documents; may be repeated",
    )
    add("--column", help="name of the text in JSON objects and in rows of tables (default: %(default)s)")
    add(
        "--on-error",
        choices=["skip", "stop"],
        help="what to do at a place that is not a document: count and skip it, or stop (default: %(default)s)",
    )
    parser.set_defaults(column=PrepareOptions.column, on_error=PrepareOptions.on_error)


def checkpoint_path(text: str) -> str:
    """The path of a checkpoint, or its hf:// name. An empty path, such as an unset variable of the shell, does not mean
    "none"."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    from mesh_transformer import hub

    name = hub.as_name(text)
    if name is not None and not text.startswith("http"):
        sys.stderr.write(f"no folder {text} in {os.getcwd()}: taken as {name}, a model on the Hugging Face hub\n")
    return name or text


def add_tuning(parser: argparse.ArgumentParser) -> None:
    """Add --tune-model-path and --fresh-opt."""
    add_model_path(
        parser,
        "start at step 0 from the weights of this checkpoint: native, classic, Hugging Face or GGUF; local, gs:// "
        "or hf://ORG/NAME[@REVISION]",
    )
    parser.add_argument(
        "--fresh-opt",
        action="store_true",
        help="with --tune-model-path: start with fresh optimizer state instead of loading it",
    )
    add_adapter(
        parser,
        "with --tune-model-path: train adapters (the group lora), which begin as these; a folder of PEFT, or a run",
    )


def add_model_path(parser: argparse.ArgumentParser, help: str) -> None:
    """Add --tune-model-path."""
    parser.add_argument("--tune-model-path", type=checkpoint_path, metavar="DIR", help=help)


def parse_tuned(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a parser with the options of `add_tuning`; None: those of the process.

    Raises:
        UserError: --fresh-opt or --adapter is given without --tune-model-path.
    """
    arguments = parser.parse_args(words)
    if arguments.fresh_opt and not arguments.tune_model_path:
        raise UserError("--fresh-opt ignores the optimizer state of --tune-model-path: give that option too")
    if arguments.adapter and not arguments.tune_model_path:
        raise UserError(
            f"--adapter {arguments.adapter} has adapters of a model: give that model with --tune-model-path"
        )
    return arguments


def add_step_output(parser: argparse.ArgumentParser, flag: str, format: str, *, required: bool = False) -> None:
    """Add the options of a command that writes a checkpoint: its path (`flag`), --format (default `format`),
    --overwrite."""
    parser.add_argument(
        flag,
        dest="output",
        metavar="DIR",
        help="output folder, local or gs://. native: the parent of the new step_N folder; classic: the step folder "
        "itself, such as gptj/step_383500",
        required=required,
    )
    parser.add_argument(
        "--format",
        dest="format",
        choices=["native", "classic"],
        default=format,
        help="format of the checkpoint to write (default: %(default)s)",
    )
    add_overwrite(parser)


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add --overwrite."""
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")


def starting(config_path: str | None = None, overrides: Sequence[str] = (), *, debug: bool = False) -> None:
    """Check the config, and say that the command has started. Call it before the import of JAX, which takes seconds.

    Args:
        config_path: the config, if one is given. One whose model a checkpoint tells is checked in part.
        overrides: as for `load_config`.
        debug: whether to log what the package logs for its developers, too.

    Raises:
        ModuleNotFoundError: JAX is not installed.
        UserError: the config is invalid.
    """
    if "jax" not in sys.modules and importlib.util.find_spec("jax") is None:
        raise ModuleNotFoundError(name="jax")
    # not above: --help needs no log
    from mesh_transformer import logs

    logs.set_up(logging.DEBUG if debug else logging.INFO)
    # a pipe can be read once
    if config_path is not None and (os.path.isfile(config_path) or not os.path.exists(config_path)):
        _check_config(config_path, overrides)
    logs.log.info("importing JAX")


class _ModelElsewhere(Exception):
    """A checkpoint tells the model of a config."""


def _check_config(path: str, overrides: Sequence[str]) -> None:
    from mesh_transformer.config import CheckpointConfig, load_config

    def find_model(_: CheckpointConfig) -> None:
        raise _ModelElsewhere

    with contextlib.suppress(_ModelElsewhere):
        load_config(path, overrides, find_model)


def run(main: Callable[[], int | None], *, any_python: bool = False) -> NoReturn:
    """Run an entry point and exit with its code: 0 by default, 2 for bad input, 1 for a failed run, 130 after Ctrl-C.

    An error is printed as one line, and so is a package that is not installed.

    Args:
        any_python: the entry point runs on versions of Python that are not supported, too.
    """
    collect_rarely()
    cpu_devices.give_threads()
    outlive_terminal()
    # a training run replaces this handler
    for number in TERMINATIONS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    environment.handle_interrupts()
    try:
        if not any_python:
            environment.check_python()
        with environment.requirements():
            code = _explained(main) or 0
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


def _explained(main: Callable[[], int | None]) -> int | None:
    """The result of `main`. An allocation that fails is a RunError."""
    try:
        return main()
    except Exception as error:
        if failure := out_of_memory(error):
            raise failure from error
        raise


def collect_rarely() -> None:
    """Let CPython search for cyclic garbage less often, and not at the exit.

    Modules and traced programs are a million objects that live until the end. With CPython's defaults, a run of a few
    steps spends a fifth of its CPU time on searches through them.
    """
    gc.set_threshold(_NEW_OBJECTS)
    # registered first, so that it is called after all other functions of this kind
    atexit.register(gc.freeze)


def _silence_deletions() -> None:
    """Objects that were not fully constructed raise when they are deleted; do not print that."""
    sys.unraisablehook = lambda _: None
