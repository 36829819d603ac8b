"""Finds, loads and runs tasks of the harness. The task files in tasks/ read LAMBADA and PIQA from local files.

Importing this module does not import the harness.
"""

import contextlib
import importlib.util
import json
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mesh_transformer import liveness
from mesh_transformer.errors import UserError, did_you_mean

OLD_NAMES = {"lambada": "lambada_openai"}
DEFAULT_TASKS = ("lambada_openai", "piqa", "hellaswag", "winogrande", "mathqa", "pubmedqa")
# task files that read local data
LOCAL_TASKS = Path(__file__).parent / "tasks"


def check_installed() -> None:
    """Check that the harness is installed.

    Raises:
        UserError: it is not.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-evaluation-harness is not installed: pip install -e '.[eval]'")


class Tasks:
    """Loaded tasks. They can run several times.

    Args:
        names: names of tasks, groups or tags of the harness, or of tasks in `include_path`. Names that the original
            program uses work too.
        include_path: a folder with additional task files. They replace tasks of the harness with the same name.
        data_dir: a folder with LAMBADA and PIQA, to use instead of the Hugging Face hub.
        num_fewshot: examples before each question. None: the number that the task sets, else 0.
        limit: the largest number of questions per task. None: no limit.

    Raises:
        UserError: the harness is not installed, or a task cannot be loaded.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        include_path: str | None = None,
        data_dir: str | None = None,
        num_fewshot: int | None = None,
        limit: int | None = None,
    ):
        check_installed()
        for what, folder in (("task files", include_path), ("LAMBADA and PIQA", data_dir)):
            if folder is not None and not os.path.isdir(folder):
                raise UserError(f"{folder} is not a folder: give the path of a folder with {what}")
        names = [OLD_NAMES.get(name, name) for name in names]
        manager = _manager(names, include_path, data_dir)
        self.limit = limit
        _seed()
        self._loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
        for name in names:
            for kind, entries in _load(manager, name).items():
                self._loaded[kind].update(entries)
        for task in self._loaded["tasks"].values():
            self._set_fewshot(task, num_fewshot)

    @property
    def names(self) -> list[str]:
        """The names of the tasks, with groups and tags expanded."""
        return list(self._loaded["tasks"])

    def run(self, lm: Any, *, bootstrap: int = 0) -> dict[str, Any]:
        """Run all tasks with the harness's `evaluate`, and return its results without the samples.

        Args:
            lm: an LM of the harness.
            bootstrap: samples for standard errors that have no formula. 0: compute no standard errors.
        """
        from lm_eval.evaluator import evaluate

        _seed()
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=1234)
        # the harness would fork this process, which uses devices
        os.environ["DISABLE_MULTIPROC"] = "1"
        with contextlib.redirect_stdout(sys.stderr):
            return evaluate(lm, self._loaded, limit=self.limit, bootstrap_iters=bootstrap, log_samples=False)

    def requests(self) -> dict[str, list[Any]]:
        """All requests of the tasks, by request type."""
        requests: dict[str, list[Any]] = {}
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=1234)
            task.build_all_requests(limit=self.limit, rank=0, world_size=1)
            for instance in task.instances:
                requests.setdefault(instance.request_type, []).append(instance)
        return requests

    def _set_fewshot(self, task: Any, num_fewshot: int | None) -> None:
        """Set num_fewshot as the harness does: a task with 0 keeps it."""
        configured = task.get_config("num_fewshot")
        if configured is None or (num_fewshot is not None and configured != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)


def _seed() -> None:
    """Set the harness's seeds, because some tasks shuffle their choices."""
    random.seed(0)
    np.random.seed(1234)


def _manager(names: Sequence[str], include_path: str | None, data_dir: str | None) -> Any:
    """A TaskManager that knows the tasks. If all are in the given folders, it does not index the harness's 14,000
    files."""
    from lm_eval.tasks import TaskManager

    # the harness warns about each task file that replaces another
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folders = [str(LOCAL_TASKS)] * (data_dir is not None) + [include_path] * (include_path is not None)
    metadata = {"data_dir": data_dir} if data_dir else None
    if folders:
        local = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
        if set(names) <= set(local.all_subtasks):
            return local
    return TaskManager(include_path=folders or None, metadata=metadata)


def _load(manager: Any, name: str) -> dict[str, Any]:
    """The task with this name, or all tasks of a group or tag, in the form for `evaluate`."""
    if name not in manager.all_tasks and not os.path.isfile(name):
        raise UserError(
            f"there is no task {name}{did_you_mean(name, manager.all_tasks)}: `lm-eval ls tasks` lists the tasks of "
            "the harness, and --include-path adds a folder with tasks"
        )
    try:
        with contextlib.redirect_stdout(sys.stderr), liveness.service_call():
            return manager.load(name)
    except Exception as error:  # noqa: BLE001  (data sets and task files raise any exception)
        reason = str(error).strip().split("\n")[0][:300]
        raise UserError(
            f"task {name} cannot be loaded ({type(error).__name__}: {reason}): if its data cannot be downloaded, use "
            f"--data-dir (data.eval_harness_data in training) or your own task file to read the data from a folder; "
            f"see docs/evaluate.md"
        ) from error


def lambada(data_dir: str = "", **_: Any) -> dict[str, Any]:
    """The data set in `data_dir`/lambada/lambada_test.jsonl, with {"text"} on each line."""
    return {"test": _dataset(lambda: map(json.loads, _lines(data_dir, "lambada", "lambada_test.jsonl")))}


def piqa(data_dir: str = "", **_: Any) -> dict[str, Any]:
    """The data set in `data_dir`/piqa: valid.jsonl with {"goal", "sol1", "sol2"}, and valid-labels.lst with 0 or 1 per
    line."""

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
