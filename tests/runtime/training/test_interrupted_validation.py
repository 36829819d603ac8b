"""A run that a signal stops during a validation, in this process."""

import signal
from pathlib import Path
from typing import Any

import pytest
from support.commands import write_run

from mesh_transformer.config import load_config
from mesh_transformer.logs import read_json_lines
from mesh_transformer.runtime.training import trainer
from mesh_transformer.runtime.training.observer import Observer
from mesh_transformer.runtime.training.start import TuningSource

GROUPS = {
    "model": {"layers": 1, "d_model": 16, "n_heads": 2, "seq": 16, "pe_rotary_dims": 4},
    "optimizer": {"total_steps": 4, "gradient_accumulation_steps": 1},
    "data": {"val_set": {"first": "text.txt", "second": "text.txt"}, "val_every": 2, "val_batches": 2},
    "checkpoint": {"ckpt_every": 3, "keep_every": None},
}
VALIDATED = {"val/loss_first", "val/accuracy_first", "val/loss_second", "val/accuracy_second"}


class Stop(Observer):
    """Sends a SIGTERM when the validation after a step begins."""

    def __init__(self, step: int):
        self._step = step

    def phase(self, name: str, step: int) -> None:
        if (name, step) == ("validate", self._step):
            signal.raise_signal(signal.SIGTERM)


def train(folder: Path, code: int = 0, observer: Observer | None = None) -> dict[int, dict[str, Any]]:
    """The last record of each step, after a run that ends with `code`."""
    path = f"checkpoint.model_dir={folder}"
    result = trainer.train(load_config("config.json", [path]), TuningSource(), observer)
    assert result.code == code
    return {record["step"]: record for record in read_json_lines(str(folder / "metrics.jsonl"))}


@pytest.mark.parametrize("step", [2, 4])
def test_the_resumed_run_begins_with_the_validation(tmp_path, monkeypatch, step) -> None:
    """Also at the last step, after which no step is left; and after a second signal at the same place."""
    write_run(tmp_path, **GROUPS)
    monkeypatch.chdir(tmp_path)
    expected, stopped = train(tmp_path / "straight"), 128 + signal.SIGTERM
    for _ in range(2):
        found = train(tmp_path / "run", stopped, Stop(step))
        assert max(found) == step
        assert not VALIDATED & found[step].keys()
    found = train(tmp_path / "run")
    for number in (2, 4):
        assert expected[number].keys() == found[number].keys() > VALIDATED
        for name in (*VALIDATED, "train/loss"):
            assert found[number][name] == expected[number][name], name
