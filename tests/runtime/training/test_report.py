"""Tokens/s, TFLOP/s, MFU and goodput, of a reporter with a simulated clock and of a run in this process."""

import jax
import numpy as np
import pytest
from support.commands import metrics, write_run
from support.events import read_events

from mesh_transformer import accelerators
from mesh_transformer.config import load_config
from mesh_transformer.logs import Progress, step_summary
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.training import report, trainer
from mesh_transformer.runtime.training.report import Goodput, MetricsReporter, StepWork
from mesh_transformer.runtime.training.start import TuningSource
from mesh_transformer.spec.flops import flops_per_token

NEW = ("train/tflops_per_device", "train/mfu", "train/goodput")
WORK = StepWork(tokens=1000, tflop_per_device=50.0, peak_tflops=200.0)


class Clock:
    """A simulated `time.monotonic`."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Records:
    """A sink that keeps what is written."""

    def __init__(self):
        self.records = {}

    def write(self, step, scalars):
        self.records[step] = dict(scalars)

    def close(self):
        pass


class Run:
    """Steps of 1 s with a reporter that starts after 10 s and `start_step`."""

    def __init__(self, monkeypatch, *, start_step=0, logged_step=0, work=WORK):
        self.clock, self.sink, self.step = Clock(), Records(), start_step
        monkeypatch.setattr(report, "time", self.clock)
        goodput = Goodput(self.clock.now, start_step, logged_step)
        self.clock.now = 10.0
        progress = Progress("training", unit="step", quiet=True)
        self.reporter = MetricsReporter([self.sink], progress, work, goodput, 0, stop=False)

    def steps(self, count, *, finite=True):
        for _ in range(count):
            self.step += 1
            names = ("loss", "grad_norm", "param_norm")
            values = {f"train/{name}": np.float32(1) for name in names} | {"finite": np.bool_(finite), "skipped": 0}
            self.reporter.push(self.step, values, {})
            self.clock.now += 1.0
            # read the step when it ends; in a run, the next `push` waits for it
            self.reporter.settle()

    def pass_time(self, seconds):
        with self.reporter.pause():
            self.clock.now += seconds

    def end(self):
        with self.reporter:
            pass
        return [self.sink.records[step] for step in sorted(self.sink.records)]


def test_rates_are_of_the_time_of_a_step_without_pauses(monkeypatch):
    run = Run(monkeypatch)
    run.steps(3)
    run.pass_time(100)
    run.steps(1)
    for record in run.end():
        assert record["train/tokens_per_sec"] == pytest.approx(1000)
        assert record["train/tflops_per_device"] == pytest.approx(50)
        assert record["train/mfu"] == pytest.approx(0.25)


def test_goodput_is_the_share_of_steps_after_the_first(monkeypatch):
    """10 s before the first step, 1 s of the first step."""
    run = Run(monkeypatch)
    run.steps(90)
    shares = [record["train/goodput"] for record in run.end()]
    assert shares == pytest.approx([(step - 1) / (10 + step) for step in range(1, 91)])
    assert shares[-1] > 0.88


def test_a_pause_lowers_the_goodput(monkeypatch):
    """Such as a validation or a save."""
    run = Run(monkeypatch)
    run.steps(50)
    run.pass_time(40)
    run.steps(40)
    assert run.end()[-1]["train/goodput"] == pytest.approx(89 / 140)


def test_skipped_and_repeated_steps_lower_the_goodput(monkeypatch):
    run = Run(monkeypatch)
    run.steps(50)
    run.steps(40, finite=False)
    assert run.end()[-1]["train/goodput"] == pytest.approx(49 / 100)
    # an earlier process has logged 30 of the 90 steps
    run = Run(monkeypatch, start_step=100, logged_step=130)
    run.steps(90)
    assert run.end()[-1]["train/goodput"] == pytest.approx(60 / 100)


def test_a_device_without_a_known_peak_has_no_mfu(monkeypatch):
    run = Run(monkeypatch, work=StepWork(1000, 50.0, None))
    run.steps(2)
    for record in run.end():
        assert "train/mfu" not in record
        assert record["train/tflops_per_device"] == pytest.approx(50)


def test_a_progress_line_shows_the_mfu_where_it_is_known():
    scalars = {"train/loss": 2.34567, "train/tokens_per_sec": 12345.6}
    assert step_summary(scalars) == {"loss": "2.3457", "tokens/s": "12,346"}
    assert step_summary({**scalars, "train/mfu": 0.432})["mfu"] == "43%"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("report")
    model = {"layers": 1, "d_model": 16, "n_heads": 2, "seq": 16, "pe_rotary_dims": 4}
    optimizer = {"total_steps": 4, "gradient_accumulation_steps": 1}
    write_run(made, model=model, optimizer=optimizer, data={"val_every": 2}, logging={"tensorboard": True})
    return made


def test_a_run_writes_the_rates_to_every_sink(folder, monkeypatch):
    """The MFU of a kind of device that the table is made to know is by the formula of `spec.flops`."""
    monkeypatch.chdir(folder)
    peak = accelerators.Accelerator("fake", "cpu", peak_tflops=0.5, memory_gb_s=1, usable_gib=1)
    monkeypatch.setitem(accelerators.ACCELERATORS, "fake", peak)
    config = load_config("config.json")
    assert trainer.train(config, TuningSource()).code == 0
    records = metrics(folder / "run")
    assert len(records) == 4
    flops = flops_per_token(config.model.decoder(), config.seq)
    for record in records:
        tflops = flops * record["train/tokens_per_sec"] / jax.device_count() / 1e12
        assert record["train/tflops_per_device"] == pytest.approx(tflops)
        assert record["train/mfu"] == pytest.approx(tflops / 0.5)
        assert 0 <= record["train/goodput"] < 1
    assert records[0]["train/goodput"] == 0 < records[1]["train/goodput"]
    assert _tensorboard(folder / "run/tensorboard") == [
        (record["step"], name, pytest.approx(record[name], rel=1e-6)) for record in records for name in NEW
    ]


def _tensorboard(folder):
    """(step, name, value) of the new metrics in the event file, in the order in which they were written."""
    found = [
        (event.step, value.tag, value.simple_value) for event in read_events(folder) for value in event.summary.value
    ]
    return [(step, tag, value) for step, tag, value in found if tag in NEW]


def test_the_table_does_not_know_this_cpu(folder, monkeypatch):
    monkeypatch.chdir(folder)
    session = Session.open(load_config("config.json"))
    work = StepWork.of(session)
    assert work.peak_tflops is None
    assert work.tokens == 8 * 16
    assert work.rates(2.0).keys() == {"train/tokens_per_sec", "train/tflops_per_device"}
