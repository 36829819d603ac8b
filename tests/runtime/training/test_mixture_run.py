"""A run on a mixture: its metrics, its end with the data, and the same losses after a stop."""

from pathlib import Path

import numpy as np
import pytest
from support import permuted
from support.commands import metrics, write_run

from mesh_transformer.config import load_config
from mesh_transformer.data.records.tfrecords import write_records
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.training.start import TuningSource
from mesh_transformer.runtime.training.trainer import train

SEQ, BATCH, STEPS = 16, 8, 9
# 16 records a step: `code` has its 40 after the 3rd record of step 6, so the run ends without `others`
SOURCES = {
    "pile": {"set": "pile.tfrecords", "weight": {"0": 0.5, "4": 0.75}},
    "code": {"set": "code.tfrecords", "weight": {"0": 0.5, "4": 0.25}, "epochs": 1},
}


def write_all(folder):
    """The records of both sources, and the config."""
    draw = np.random.default_rng(0)
    for name, count in (("pile", 50), ("code", 40)):
        write_records(str(folder / f"{name}.tfrecords"), draw.integers(0, 257, (count, SEQ + 1)).astype(np.int32))
    write_run(
        folder,
        model={"layers": 1, "d_model": 16, "n_heads": 2, "seq": SEQ, "pe_rotary_dims": 4},
        optimizer={"total_steps": STEPS, "z_loss": 0},
        data={"train_set": SOURCES, "val_set": {}, "shuffle": "whole", "batch_size": BATCH},
        checkpoint={"ckpt_every": 4, "keep_every": None},
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The metrics of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        write_all(folder)
        assert train(config(), TuningSource()).code == 0
        return records("run")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    return tmp_path


def config(*overrides):
    return load_config("config.json", overrides)


def records(name):
    """The metrics of each step, without those of time."""
    kept = ("train/loss", "train/grad_norm", "data/", "val/")
    return {
        record["step"]: {key: value for key, value in record.items() if key.startswith(kept)}
        for record in metrics(Path(name))
    }


def test_a_stopped_run_has_the_losses_of_an_uninterrupted_one(folder, straight):
    """It stops at step 5, after a change of weights and before the end of code. A driver reads the rest, and all losses
    and counts are those of one run to the bit."""
    train(config("optimizer.total_steps=5"), TuningSource())
    streamed = permuted.Streamed(config())
    assert train(config(), TuningSource(), open_feed=streamed.open).step == STEPS
    streamed.close()
    assert records("run") == straight


def test_metrics_by_source(straight):
    steps = straight
    assert steps[3]["data/tokens_code"] == steps[3]["data/tokens_pile"] == 3 * 8 * SEQ
    assert steps[5]["data/tokens_pile"] == (3 * 8 + 2 * 12) * SEQ
    assert steps[5]["data/epochs_code"] == (3 * 8 + 2 * 4) / 40
    # a quarter of the draws until code has no more records
    assert steps[STEPS]["data/tokens_code"] == 40 * SEQ
    # equal parts of steps 1 to 3; from then on, code has a quarter
    for step, share in ((1, 0.5), (3, 0.5), (4, 0.25), (5, 0.25)):
        mean = share * steps[step]["train/loss_code"] + (1 - share) * steps[step]["train/loss_pile"]
        # sums in float32
        assert mean == pytest.approx(steps[step]["train/loss"], rel=1e-5)
    # no token of code in a step, no loss
    assert "train/loss_code" not in steps[STEPS]
    assert "train/loss_pile" in steps[STEPS]


def test_a_run_ends_with_its_data(folder, caplog):
    """A driver reads it at first."""
    caplog.set_level("INFO")
    ends = ("data.train_set.code.after_epochs=end_run", "data.val_set.code=code.tfrecords")
    streamed = permuted.Streamed(config(*ends))
    result = train(config(*ends), TuningSource(), open_feed=streamed.open)
    streamed.close()
    assert (result.code, result.step) == (0, 7)
    assert "step 7 of 9, where the training data ends" in result.summary()
    assert "data.train_set ends before step 8: the source code has no more records" in caplog.text
    assert (folder / "run/step_7").exists()
    assert "val/loss_code" in records("run")[7]
    again = train(config(*ends), TuningSource())
    assert (again.code, again.start_step, again.step) == (0, 7, 7)
    assert list(records("run")) == list(range(1, 8))
    # more passes continue it
    assert train(config("data.train_set.code.epochs=2"), TuningSource()).step == STEPS


def test_restart_keeps_the_step_of_the_weights(folder):
    train(config("optimizer.total_steps=4"), TuningSource())
    other = {"data.train_set.pile.set": "code.tfrecords", "data.restart": "true", "optimizer.total_steps": "5"}
    with pytest.raises(UserError, match="the source pile has changed .* pile.tfrecords, and is code.tfrecords"):
        train(config("data.train_set.pile.set=code.tfrecords"), TuningSource())
    train(config(*(f"{name}={value}" for name, value in other.items())), TuningSource())
    # the weights of step 5, and counts from 0
    assert records("run")[5]["data/tokens_pile"] == 12 * SEQ


def test_data_that_fills_no_step_is_refused(folder):
    alone = 'data.train_set={"code": {"set": "code.tfrecords", "weight": 1, "epochs": 1}}'
    with pytest.raises(UserError, match="data.train_set fills no step of 128 records: a source with a weight has no"):
        train(config(alone, "data.batch_size=64"), TuningSource())
