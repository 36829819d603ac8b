"""The estimate of steps that libtpu compiled, recorded by scripts/tpu_programs.py.

The program is GPT-J-6B with 16 microbatches of one sequence of 2,048 tokens. The expected figures are
from an estimator that was written for design studies of these programs, apart from this code.
"""

import gzip
from pathlib import Path

import pytest

from mesh_transformer.accelerators import ACCELERATORS
from mesh_transformer.config import load_config
from mesh_transformer.estimate.timeline import ProgramEstimate, Timeline
from mesh_transformer.spec.flops import flops_per_token

TOKENS = 16 * 2048


def estimate(name: str) -> ProgramEstimate:
    text = gzip.decompress(Path(__file__).with_name("programs").joinpath(f"{name}.hlo.gz").read_bytes()).decode()
    return Timeline(text, ACCELERATORS[name.split("-")[0]]).estimate()


@pytest.mark.parametrize(
    ("name", "devices", "mfu", "milliseconds"),
    [("v3-8", 8, 0.429, 5876), ("v4-8", 4, 0.314, 3589), ("v5e-8", 8, 0.292, 2699)],
)
def test_utilization_of_a_step(repo, name, devices, mfu, milliseconds):
    found = estimate(name)
    assert 1000 * found.seconds == pytest.approx(milliseconds, rel=0.01)
    model = load_config(str(repo / "configs/6B_finetune_v3-8.json")).model
    peak = 1e12 * ACCELERATORS[name.split("-")[0]].peak_tflops * devices
    assert flops_per_token(model.decoder(), 2048) * TOKENS / found.seconds / peak == pytest.approx(mfu, rel=0.01)
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert not found.unknown_loops


def test_parts_of_a_step():
    """ms on a v3-8: the products take 92% of the peak, the collectives are the two sums of a layer and five others."""
    parts = {name: 1000 * seconds for name, seconds in estimate("v3-8").parts.items()}
    assert parts["products"] == pytest.approx(3032, rel=0.01)
    assert parts["attention"] == pytest.approx(812, rel=0.02)
    assert parts["collectives"] == pytest.approx(254, rel=0.01)
    assert parts["head"] + parts["optimizer"] == pytest.approx(102 + 440, rel=0.02)
    assert parts["waiting"] == 0
