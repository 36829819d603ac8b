"""Training from Python: `fit`, and the run that it returns."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import mesh_transformer
from mesh_transformer import logs, platforms
from mesh_transformer.config.describe import short
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log
from mesh_transformer.runtime.api.model import Model
from mesh_transformer.runtime.api.opening import open_devices
from mesh_transformer.runtime.training import run_folder
from mesh_transformer.runtime.training.config import training_config
from mesh_transformer.runtime.training.result import TrainingResult
from mesh_transformer.runtime.training.start import TuningSource
from mesh_transformer.runtime.training.trainer import train

_WAIT_S = 0.2


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has ended, or was stopped.

    Args:
        folder: its folder, with metrics.jsonl and loss.png.
        step: the last step.
        checkpoint: the checkpoint of that step, which `load` takes.
    """

    folder: str
    step: int
    checkpoint: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, oldest first: a step with its metrics."""
        return logs.read_json_lines(os.path.join(self.folder, run_folder.METRICS))

    def load(self, **options: Any) -> Model:
        """The trained model. `options` as in `load`."""
        return mesh_transformer.load(self.checkpoint, **options)


class _Stop:
    """See `trainer.StopRequest`: the thread that waits for the run sets `received`."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.in_loop = False

    def exit_code(self, step: int) -> int | None:
        return None if self.received is None else 128 + self.received


def fit_config(
    config: str | Mapping[str, Any], tune_from: str | None, fresh_opt: bool, groups: Mapping[str, Mapping[str, Any]]
) -> Run:
    """See `entry.fit`."""
    if fresh_opt and tune_from is None:
        raise UserError("fresh_opt ignores the optimizer state of tune_from: give tune_from too")
    platforms.require_one_process()
    if not isinstance(config, str):
        config = json.loads(json.dumps(config, default=plain))
    settings = training_config(config, _overrides(groups), tune_from)
    open_devices()
    stop, ended = _Stop(), threading.Event()
    results, failures = list[TrainingResult](), list[BaseException]()

    def work() -> None:
        try:
            results.append(train(settings, TuningSource(tune_from, fresh_opt), interrupt=stop))
        except BaseException as error:  # noqa: BLE001  (the caller raises it)
            failures.append(error)
        ended.set()

    # Ctrl-C interrupts this thread, and not a step
    threading.Thread(target=work, name="fit").start()
    while not ended.is_set():
        try:
            # Python looks for Ctrl-C between two waits
            ended.wait(_WAIT_S)
        except KeyboardInterrupt:
            if stop.received is not None:
                raise
            stop.received = signal.SIGINT
            log.warning("saving after this step; Ctrl-C again returns at once, and the thread saves alone")
        except BaseException:
            # the end of the process waits for the thread, which saves
            stop.received = signal.SIGTERM
            raise
    if failures:
        # without a cycle of the error and this frame, which would keep the arrays of the run
        raise failures.pop()
    (result,) = results
    log.info("%s", result.summary())
    return Run(settings.checkpoint.model_dir, result.step, result.checkpoint)


def _overrides(groups: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """The values of groups as overrides of the command line."""
    overrides = []
    for group, values in groups.items():
        if not isinstance(values, Mapping):
            raise UserError(f'{group} {short(values)}: give the values of a group, such as {group}={{"key": value}}')
        for name, value in values.items():
            given = os.fspath(value) if isinstance(value, os.PathLike) else value
            text = given if isinstance(given, str) else json.dumps(given, default=plain)
            overrides.append(f"{group}.{name}={text}")
    return overrides


def plain(value: Any) -> Any:
    """What JSON can hold of a path, or of a number or an array of numpy."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise UserError(f"{short(value)}: a config holds numbers, texts, lists and dictionaries")
