"""The trace of logging.profile_steps, of runs in this process."""

import collections
import contextlib
import csv
import gzip
import json
import logging
import shutil
import signal
from pathlib import Path

import jax
import pytest
from support.commands import write_run

from mesh_transformer.config import load_config, parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.estimate.op_table import COLUMNS
from mesh_transformer.runtime.training import trainer
from mesh_transformer.runtime.training.observer import Observer
from mesh_transformer.runtime.training.profile import StepProfile
from mesh_transformer.runtime.training.start import TuningSource

GROUPS = {
    "model": {"layers": 1, "d_model": 16, "n_heads": 2, "seq": 16, "pe_rotary_dims": 4},
    "optimizer": {"total_steps": 5, "gradient_accumulation_steps": 1},
    "data": {"val_batches": 0},
    "checkpoint": {"ckpt_every": 4, "keep_every": None},
}


@pytest.fixture
def train(tmp_path, monkeypatch, caplog):
    """Trains with some overrides, and returns the folders of all traces, oldest first."""
    caplog.set_level(logging.INFO, "mesh_transformer")
    write_run(tmp_path, **GROUPS)
    monkeypatch.chdir(tmp_path)

    def run(*overrides, code=0, observer=None):
        assert trainer.train(load_config("config.json", overrides), TuningSource(), observer).code == code
        return sorted((tmp_path / "run/profile/plugins/profile").glob("*"))

    return run


class StopAfter(Observer):
    """Stops the run after a step."""

    def __init__(self, step):
        self._step = step

    def phase(self, name, step):
        if (name, step) == ("data", self._step):
            signal.raise_signal(signal.SIGTERM)


def _events(folder):
    (path,) = folder.glob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            yield from line.events


def _steps(folder):
    """The steps of the trace, by their annotations."""
    return [dict(event.stats)["step_num"] for event in _events(folder) if event.name == "train"]


def _executions(folder):
    """The operations of each execution of the training step: how often each ran."""
    runs = collections.defaultdict(collections.Counter)
    for event in _events(folder):
        stats = dict(event.stats)
        if stats.get("hlo_module") == "jit__train_step":
            runs[stats["run_id"]][stats["hlo_op"], stats["device_ordinal"]] += 1
    return list(runs.values())


def test_a_trace_has_whole_steps(train):
    # long enough that the last step has not ended when the trace is to stop
    (folder,) = train("logging.profile_steps=[2, 4]", "optimizer.gradient_accumulation_steps=16")
    assert _steps(folder) == [2, 3, 4]
    executions = _executions(folder)
    assert len(executions) == 3
    assert executions[0] == executions[1] == executions[2]
    assert {device for _, device in executions[0]} == set(range(jax.device_count()))
    with gzip.open(folder / "perfetto_trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("train") == 3


def test_a_range_beyond_the_end_is_cut(train, caplog):
    (folder,) = train("logging.profile_steps=[5, 1000000000000]")
    assert _steps(folder) == [5]
    assert len(_executions(folder)) == 1
    assert "trace of steps 5 to 5 written to run/profile" in caplog.text


class NoReport:
    """A reporter of steps that have all ended."""

    pause = contextlib.nullcontext

    def settle(self):
        pass


def _traced(first, last):
    """The steps that a run traces which computes steps `first` to `last`, of the range 2 to 4."""
    config, folder = load_config("config.json", ["logging.profile_steps=[2, 4]"]), Path("run/profile")
    computed, waits = range(first, last + 1), []
    with StepProfile(config, computed, NoReport(), Observer(), lambda: waits.append(step)) as profile:
        for step in computed:
            with profile.step(step):
                pass
    found = [_steps(trace) for trace in folder.glob("plugins/profile/*")]
    shutil.rmtree(folder, ignore_errors=True)
    # a trace ends when no checkpoint is being written
    assert waits == [steps[-1] for steps in found]
    return found


def test_a_resumed_run_traces_the_rest_of_the_range(train, caplog):
    assert _traced(1, 3) == [[2, 3]]
    assert _traced(3, 9) == [[3, 4]]
    assert "no trace" not in caplog.text
    assert _traced(5, 9) == []
    assert "logging.profile_steps [2, 4]: no trace, because this start computes steps 5 to 9" in caplog.text
    # the run is complete
    caplog.clear()
    assert _traced(10, 9) == []
    assert "logging.profile_steps [2, 4]: no trace, because this start computes no step" in caplog.text


def test_a_run_that_is_stopped_in_the_range_writes_the_trace(train, caplog):
    (folder,) = train("logging.profile_steps=[2, 4]", code=128 + signal.SIGTERM, observer=StopAfter(3))
    assert _steps(folder) == [2, 3]
    assert len(_executions(folder)) == 2
    assert "trace of steps 2 to 3 written" in caplog.text


@pytest.mark.parametrize(
    "value", [[4, 2], [0, 3], [2], [2, 3, 4], [1.5, 3], [True, 3], [None, 3], 3, "2-3", ["2", "3"], {}], ids=str
)
def test_a_bad_range_is_refused(value):
    raw = {"model": {**GROUPS["model"], "n_vocab": 257}, "data": {"batch_size": 8}}
    match = r"^logging\.profile_steps = .*: expected two whole numbers, the first 1 or more and .*such as \[10, 13\]$"
    with pytest.raises(UserError, match=match):
        parse_config({**raw, "logging": {"profile_steps": value}})
    assert parse_config({**raw, "logging": {"profile_steps": [2.0, 2]}}).logging.profile_steps == (2, 2)
    assert parse_config({**raw, "logging": {"profile_steps": None}}).logging.profile_steps is None


def test_the_table_of_operations(train, tmp_path):
    """The products of the layers run once for each layer and microbatch, forward and backward."""
    train("logging.op_table=true", "optimizer.total_steps=1", "model.layers=3")
    assert b"\r" not in (tmp_path / "run/profile/op_table.tsv").read_bytes()
    with (tmp_path / "run/profile/op_table.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert tuple(rows[0]) == COLUMNS
    products = [row for row in rows if row["part"] == "products" and int(row["flops"])]
    assert products
    assert {int(row["runs"]) for row in products} == {3}
    assert {row["seconds"] for row in rows} == {""}
    assert {row["part"] for row in rows} >= {"products", "attention", "head", "optimizer"}
