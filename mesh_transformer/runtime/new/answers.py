"""The five questions of `mesh-transformer new`, and what their answers may be. Only a checkpoint needs JAX."""

import glob
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mesh_transformer import slices
from mesh_transformer.accelerators import GPUS, gpu_name, of_device
from mesh_transformer.errors import UserError, options_to_add

CPU = "cpu"
GOALS = ("train", "tune")
_HOURS = {"min": 1 / 60, "h": 1.0, "hour": 1.0, "hours": 1.0, "d": 24.0, "day": 24.0, "days": 24.0}
_TOKENS = {"tokens": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BUDGET = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]+)(?:\s+tokens)?", re.IGNORECASE)
_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)
# a budget beyond these is a slip of the keyboard
_MOST_HOURS, _MOST_TOKENS = 24 * 365 * 10, 1e15
# of the paths in this folder that a question shows
_MOST_PATHS, _WIDTH = 4, 100
Texts = Mapping[str, str]
"""The answers so far, as they were given, by the name of their option."""


class Budget(NamedTuple):
    """Hours of training, or tokens. One of them is None."""

    hours: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class Answers:
    """The checked answers.

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
    """A question.

    Args:
        check: raises UserError if an answer is not valid. A text that it returns is the usual spelling.
        choices: the valid answers, in words.
        default: the answer of an empty line; empty: there is none.
    """

    text: str
    check: Callable[[str, Texts], object]
    choices: Callable[[Texts], str]
    default: Callable[[Texts], str]


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
        raise UserError(f"{name}.json exists: give another NAME, or {options_to_add('--overwrite')}")
    if os.path.exists(f"runs/{name}"):
        raise UserError(
            f"runs/{name} exists, and a run of this name would resume from it: give another NAME, or "
            f"{options_to_add('--overwrite')}, which keeps the folder"
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
    if name == CPU:
        return name
    if gpu := gpu_name(name):
        return gpu
    try:
        count, _ = slices.several(name)
    except UserError as error:
        raise UserError(f"hardware {text!r}: {error}; a GPU is {' or '.join(GPUS)}; else {CPU}") from error
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


def _check_model(text: str, texts: Texts) -> None:
    # it imports the families
    from mesh_transformer.runtime.new import shapes

    if "goal" in texts:
        (shapes.parse if goal(texts["goal"]) == "train" else shapes.trained)(text)


def _check_data(text: str, _: Texts) -> None:
    # it imports numpy
    from mesh_transformer.runtime.new import data_set

    data_set.find(text.strip())


def _models(texts: Texts) -> str:
    if texts["goal"] != "train":
        here = _listed(_runs(), "here")
        return f"the folder of a run or of a Hugging Face model, a GGUF file, hf://ORG/NAME, or 6B (GPT-J-6B){here}"
    from mesh_transformer.runtime.new.shapes import DENSE, SEPARATOR, SHAPES

    sizes = ", ".join(shape.name for shape in SHAPES)
    return (
        f"a size of the family gptj: {sizes}; a family, whose size follows from the budget: {', '.join(DENSE)}; or "
        f"both, such as llama{SEPARATOR}tiny"
    )


def _runs() -> list[str]:
    """The runs in this folder, newest first."""
    return sorted({os.path.dirname(step) for step in glob.glob("runs/*/step_*")}, key=os.path.getmtime, reverse=True)


def _data_sets() -> list[str]:
    """The prepared data sets in this folder, newest first."""
    return sorted(map(os.path.dirname, glob.glob("*/train.index")), key=os.path.getmtime, reverse=True)


def _listed(paths: list[str], where: str) -> str:
    return f"; {where}: {', '.join(paths[:_MOST_PATHS])}" if paths else ""


def attached() -> str:
    """The GPU of this machine if the table of accelerators has it, else `cpu`. The driver of NVIDIA names it."""
    for path in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        with open(path, encoding="utf-8", errors="replace") as file:
            model = re.search(r"^Model:\s*(.+?)\s*$", file.read(1 << 16), re.MULTILINE)
        if model and (gpu := of_device(model[1])):
            return gpu.name
    return CPU


QUESTIONS = {
    "goal": Question(
        "Train a new model, or tune a trained one?",
        lambda text, _: goal(text),
        lambda _: ", ".join(GOALS),
        lambda _: GOALS[0],
    ),
    "model": Question(
        "Which model?",
        _check_model,
        _models,
        lambda texts: "llama" if texts["goal"] == "train" else "".join(_runs()[:1]),
    ),
    "data": Question(
        "Which data?",
        _check_data,
        lambda _: (
            "the folder of a data set (mesh-transformer prepare), a .txt file, an index, a .tfrecords file, or "
            f"tiny_shakespeare, which comes with the program{_listed(_data_sets(), 'here')}"
        ),
        lambda _: next(iter(_data_sets()), "tiny_shakespeare"),
    ),
    "hardware": Question(
        "On which hardware?",
        lambda text, _: hardware(text),
        lambda _: f"{CPU}, this machine; a GPU: {', '.join(GPUS)}; or a TPU slice, such as v3-8 or v5e-16",
        lambda _: attached(),
    ),
    "budget": Question(
        "For how long?",
        lambda text, _: budget(text),
        lambda _: "a time, such as 30min, 6h or 2d, or tokens, such as 500M or 2B",
        lambda texts: "30min" if texts["hardware"] == CPU else "6h",
    ),
}
"""The question for each field of `Answers`, in the order in which they are asked."""


def checked(name: str, text: str, texts: Texts) -> str:
    """An answer, in its usual spelling.

    Raises:
        UserError: it is not valid.
    """
    if not text.strip():
        raise UserError(f"--{name}: an answer is needed")
    spelling = QUESTIONS[name].check(text.strip(), texts)
    return spelling if isinstance(spelling, str) else text.strip()


def ask(name: str, texts: Texts) -> str:
    """Ask a question on the terminal until its answer is valid. Returns as `checked`.

    Raises:
        UserError: the input ends (Ctrl-D).
    """
    question = QUESTIONS[name]
    choices, default = question.choices(texts), question.default(texts)
    sys.stdout.write(f"\n{question.text}\n{textwrap.fill(choices, _WIDTH, break_on_hyphens=False)}\n")
    while True:
        try:
            text = input(f"[{default}] > " if default else "> ").strip() or default
        except EOFError as error:
            raise UserError(f"no answer for --{name}: nothing is written") from error
        try:
            return checked(name, text, texts)
        except UserError as error:
            sys.stdout.write(f"{error}\n")
