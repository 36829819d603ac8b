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
VALIDATED = {f"val/{metric}_{name}" for metric in ("loss", "bits_per_byte", "accuracy") for name in ("first", "second")}


class Stop(Observer):
    """Sends a SIGTERM when the validation after a step begins."""

    def __init__(self, step: int):
        self._step = step

    def phase(self, name: str, step: int) -> None:
        if (name, step) == ("validate", self._step):
            signal.raise_signal(signal.SIGTERM)


def train(
    folder: Path, code: int = 0, observer: Observer | None = None, tuned: str | None = None
) -> dict[int, dict[str, Any]]:
    """The last record of each step, after a run that ends with `code`.

    Args:
        tuned: the checkpoint to start from.
    """
    path = f"checkpoint.model_dir={folder}"
    result = trainer.train(load_config("config.json", [path]), TuningSource(tuned), observer)
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


def test_a_fine_tuning_begins_with_a_validation_of_the_parameters_that_it_starts_from(tmp_path, monkeypatch) -> None:
    """Step 0 has the loss of the source's last step, also after a signal at that place. A resumed run does not repeat
    it."""
    write_run(tmp_path, **GROUPS)
    monkeypatch.chdir(tmp_path)
    source = train(tmp_path / "source")
    assert 0 not in source
    found = train(tmp_path / "run", 128 + signal.SIGTERM, Stop(0), "source")
    assert found.keys() <= {0}
    assert (tmp_path / "run/step_0").is_dir()
    found, straight = train(tmp_path / "run", tuned="source"), train(tmp_path / "straight", tuned="source")
    for records in (found, straight):
        assert records[0].keys() == {"step", "train/steps_redone", *VALIDATED}
        assert {name: records[0][name] for name in VALIDATED} == {name: source[4][name] for name in VALIDATED}
    for step in range(5):
        for name in (*VALIDATED, *(["train/loss"] * (step > 0))):
            assert found[step].get(name) == straight[step].get(name), (step, name)
    written = (tmp_path / "run/metrics.jsonl").read_text()
    train(tmp_path / "run", tuned="source")
    assert (tmp_path / "run/metrics.jsonl").read_text() == written
