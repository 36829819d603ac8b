"""LAMBADA and PIQA from files: what the tasks in tasks/ read."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from mesh_transformer.errors import UserError


def lambada(data_dir: str = "", **_: Any) -> dict[str, Any]:
    """`data_dir`/lambada/lambada_test.jsonl, one {"text"} a line."""
    return {"test": _dataset(lambda: map(json.loads, _lines(data_dir, "lambada", "lambada_test.jsonl")))}


def piqa(data_dir: str = "", **_: Any) -> dict[str, Any]:
    """`data_dir`/piqa/valid.jsonl, one {"goal", "sol1", "sol2"} a line, and valid-labels.lst, one 0 or 1 a line."""

    def records() -> Iterator[dict[str, Any]]:
        labels = map(int, _lines(data_dir, "piqa", "valid-labels.lst"))
        questions = map(json.loads, _lines(data_dir, "piqa", "valid.jsonl"))
        for question, label in zip(questions, labels, strict=True):
            yield {name: question[name] for name in ("goal", "sol1", "sol2")} | {"label": label}

    return {"validation": _dataset(records)}


def _lines(*path: str) -> list[str]:
    with open(os.path.join(*path), encoding="utf-8") as file:
        return list(file)


def _dataset(records: Callable[[], Iterator[dict[str, Any]]]) -> Any:
    import datasets

    try:
        return datasets.Dataset.from_list(list(records()))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{type(error).__name__}: {error}") from error
