"""LAMBADA and PIQA from files: what the tasks in tasks/ read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from mesh_transformer.errors import UserError


def lambada(data_dir: str = "", **_: Any) -> dict[str, Any]:
    """`data_dir`/lambada/lambada_test.jsonl, one {"text"} a line."""
    return {"test": _dataset(lambda: _read_jsonl(os.path.join(data_dir, "lambada", "lambada_test.jsonl")))}


def piqa(data_dir: str = "", **_: Any) -> dict[str, Any]:
    """`data_dir`/piqa/valid.jsonl, one {"goal", "sol1", "sol2"} a line, and valid-labels.lst, one 0 or 1 a line."""

    def records() -> Iterator[dict[str, Any]]:
        folder = os.path.join(data_dir, "piqa")
        with open(os.path.join(folder, "valid-labels.lst"), encoding="utf-8") as file:
            labels = [int(line) for line in file]
        questions = list(_read_jsonl(os.path.join(folder, "valid.jsonl")))
        for question, label in zip(questions, labels, strict=True):
            yield {name: question[name] for name in ("goal", "sol1", "sol2")} | {"label": label}

    return {"validation": _dataset(records)}


def _read_jsonl(path: str) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _dataset(records: Callable[[], Iterator[dict[str, Any]]]) -> Any:
    import datasets

    try:
        return datasets.Dataset.from_list(list(records()))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{type(error).__name__}: {error}") from error
