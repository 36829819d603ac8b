"""The load of the routed experts at each validation: the file experts.jsonl of a run."""

import contextlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer import logs
from mesh_transformer.runtime.training.run_folder import EXPERTS

# by validation set, (layers with experts, experts): the tokens of an expert divided by the mean of its layer
Load = Mapping[str, np.ndarray]
_DIGITS = 4


class ExpertLoad(NamedTuple):
    """The load after `step`."""

    step: int
    load: Load


def append(folder: str, step: int, load: Load) -> None:
    """Add a record to `folder`/experts.jsonl."""
    tables = {name: np.round(table.astype(float), _DIGITS).tolist() for name, table in load.items()}
    with contextlib.closing(logs.JsonLines(os.path.join(folder, EXPERTS))) as file:
        file.append(step, {"load": tables})


def newest(folder: str) -> ExpertLoad | None:
    """The record that was written last. It may repeat a step. None if there is no record."""
    records = logs.read_json_lines(os.path.join(folder, EXPERTS), _is_load)
    if not records:
        return None
    return ExpertLoad(records[-1]["step"], {name: np.array(table) for name, table in records[-1]["load"].items()})


def cut_broken_end(folder: str) -> None:
    """Remove the incomplete record that a kill left at the end.

    Raises:
        UserError: the file is not of a run.
    """
    logs.cut_broken_end(os.path.join(folder, EXPERTS), _is_load)


def _is_load(value: Any) -> bool:
    """Whether `value` is {set: table}, with at least one set and tables of finite numbers."""
    return isinstance(value, dict) and bool(value) and all(map(_is_table, value.values()))


def _is_table(value: Any) -> bool:
    if not isinstance(value, list) or not value or not all(isinstance(row, list) and row for row in value):
        return False
    return len({len(row) for row in value}) == 1 and all(logs.is_number(number) for row in value for number in row)
