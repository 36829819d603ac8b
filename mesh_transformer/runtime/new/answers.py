"""The five questions of `mesh-transformer new`, and what their answers may be. JAX is not imported."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mesh_transformer import slices
from mesh_transformer.accelerators import ACCELERATORS
from mesh_transformer.errors import UserError

CPU = "cpu"
GOALS = ("train", "tune")
_GPUS = tuple(name for name, accelerator in ACCELERATORS.items() if not accelerator.is_tpu)
_HOURS = {"min": 1 / 60, "h": 1.0, "hour": 1.0, "hours": 1.0, "d": 24.0, "day": 24.0, "days": 24.0}
_TOKENS = {"tokens": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BUDGET = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]+)(?:\s+tokens)?", re.IGNORECASE)
_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)
# a budget beyond these is a slip of the keyboard
_MOST_HOURS, _MOST_TOKENS = 24 * 365 * 10, 1e15


class Budget(NamedTuple):
    """Hours of training, or tokens. One of them is None."""

    hours: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class Answers:
    """The checked answers. Only `plan.make` checks `model` and `data`.

    Args:
        goal: train or tune.
        model: a family, a size or both to train; a checkpoint or a size to tune.
        data: a file or the folder of a data set.
        hardware: a TPU slice, a GPU or `cpu`.
    """

    goal: str
    model: str
    data: str
    hardware: str
    budget: Budget


class Question(NamedTuple):
    """A question, and the function that checks an answer and raises UserError."""

    text: str
    check: Callable[[str], object]


def check_name(name: str, overwrite: bool) -> None:
    """Refuse a name that is no file name, and a name whose config or run exists.

    Raises:
        UserError: the name is refused.
    """
    if not _NAME.fullmatch(name) or name.endswith(".json"):
        raise UserError(f"NAME {name!r}: expected letters, digits, _ . + and -, such as my_run; the file is NAME.json")
    if overwrite:
        return
    if os.path.exists(f"{name}.json"):
        raise UserError(f"{name}.json exists: give another NAME, or --overwrite")
    if os.path.exists(f"runs/{name}"):
        raise UserError(
            f"runs/{name} exists, and a run of this name would resume from it: give another NAME, or --overwrite, "
            "which keeps the folder"
        )


def goal(text: str) -> str:
    """`train` or `tune`.

    Raises:
        UserError: it is another word.
    """
    if text.strip().lower() not in GOALS:
        raise UserError(f"goal {text!r}: expected train (a new model) or tune (a model that is trained already)")
    return text.strip().lower()


def hardware(text: str) -> str:
    """The name of a slice such as v3-8, of a GPU, or `cpu`.

    Raises:
        UserError: it is unknown.
    """
    name = text.strip().lower()
    if name == CPU or name in _GPUS:
        return name
    try:
        count, _ = slices.several(name)
    except UserError as error:
        raise UserError(f"hardware {text!r}: {error}; a GPU is {' or '.join(_GPUS)}; else {CPU}") from error
    if count > 1:
        raise UserError(f"hardware {text!r}: the closed form does not model several slices: name one of them")
    return name


def budget(text: str) -> Budget:
    """Hours such as 6h, 30min or 2d, or tokens such as 500M, 2B or 1e9 tokens.

    Raises:
        UserError: it is neither, or not positive.
    """
    match = _BUDGET.fullmatch(text.strip())
    number, unit = (float(match[1]), match[2].lower()) if match else (0.0, "")
    hours, tokens = number * _HOURS.get(unit, 0.0), number * _TOKENS.get(unit, 0.0)
    if 0 < hours <= _MOST_HOURS:
        return Budget(hours=hours)
    if 1 <= tokens <= _MOST_TOKENS:
        return Budget(tokens=tokens)
    raise UserError(f"budget {text!r}: expected a time such as 6h, 30min or 2d, or tokens such as 500M or 2B")


def given(text: str) -> str:
    """Any answer with text.

    Raises:
        UserError: it is empty.
    """
    if not text.strip():
        raise UserError("an answer is needed")
    return text.strip()


QUESTIONS = {
    "goal": Question("train a new model or tune a trained one? (train, tune)", goal),
    "model": Question(
        "which model? (train: a family such as gptj or llama, a size such as 125M, or llama:125M; tune: a checkpoint, "
        "hf://ORG/NAME or 6B)",
        given,
    ),
    "data": Question("which data? (a .txt file, an index, a .tfrecords file, or the folder of a data set)", given),
    "hardware": Question(f"on which hardware? (a slice such as v3-8, {', '.join(_GPUS)}, or {CPU})", hardware),
    "budget": Question("for how long? (hours such as 6h, or tokens such as 2B)", budget),
}
"""The question for each field of `Answers`, in the order in which they are asked."""


def ask(name: str) -> str:
    """Ask a question on the terminal until its answer is valid.

    Raises:
        UserError: the input ends (Ctrl-D).
    """
    question = QUESTIONS[name]
    while True:
        try:
            text = input(f"{question.text}\n> ")
        except EOFError as error:
            raise UserError(f"no answer for --{name}: nothing is written") from error
        try:
            question.check(text)
        except UserError as error:
            sys.stdout.write(f"{error}\n")
        else:
            return text.strip()
