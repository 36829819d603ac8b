"""The output of preflight.py for given predictions."""

import json

import pytest

from mesh_transformer.estimate.prediction import Prediction
from mesh_transformer.estimate.target import tpu_target
from mesh_transformer.runtime.preflight import report
from mesh_transformer.runtime.preflight.report import Costs

TARGET = tpu_target("v3-8")
FITS = Prediction(
    slice="v3-8",
    program="train",
    mesh={"pp": 1, "dp": 1, "fsdp": 4, "cp": 1, "ep": 1, "tp": 2},
    microbatch=4,
    accumulation=4,
    remat="full",
    sequences=16,
    fits=True,
    peak_gib=13.083,
    usable_gib=15.48,
    memory_gib={"parameters": 2.5, "activations": 10.583},
    step_s=4.0,
    step_s_range=[3.6, 4.8],
    tokens_per_s=8192.0,
    mfu=0.63,
    parts={"products": 3.0, "attention": 1.0, "collectives": 0.0},
    set=["mesh.fsdp=4", "mesh.tp=2"],
    best=True,
)
MISS = Prediction(
    slice="v3-8",
    program="train",
    mesh={"pp": 1, "dp": 8, "fsdp": 1, "cp": 1, "ep": 1, "tp": 1},
    microbatch=8,
    accumulation=2,
    remat="none",
    sequences=16,
    fits=False,
    peak_gib=20.25,
    usable_gib=15.48,
    reason="Ran out of memory",
)


def test_a_table_with_days_and_cost(capsys):
    """21,600 steps of 4 s are a day: 24 hours of 4 chips at 2 each."""
    report.print_table([[FITS, MISS]], [TARGET], Costs(21600, 2.0))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split("  ")[0] == "v3-8 *"
    assert "fsdp 4 tp 2" in lines[1]
    assert "13.08 of 15.48" in lines[1]
    assert "63.0%" in lines[1]
    assert lines[1].split()[-2:] == ["1", "192"]
    assert "no" in lines[2].split()
    text = "\n".join(lines)
    assert "v3-8, to use it: --set mesh.fsdp=4 --set mesh.tp=2" in text
    assert "products 3.000, attention 1.000\n" in text
    assert "v3-8 dp 8: Ran out of memory" in text


def test_json_has_the_documented_keys(capsys):
    report.print_json(FITS, TARGET, Costs(21600, None))
    report.print_json(MISS, TARGET, Costs(21600, None))
    fits, miss = map(json.loads, capsys.readouterr().out.splitlines())
    keys = (
        "slice mesh microbatch accumulation remat sequences fits peak_gib usable_gib step_s step_s_range tokens_per_s "
    )
    assert set((keys + "mfu parts set best reason memory_gib program estimate notes days cost").split()) == set(fits)
    assert list(fits["mesh"]) == ["pp", "dp", "fsdp", "cp", "ep", "tp"]
    assert (fits["days"], fits["cost"], fits["best"]) == (1.0, None, True)
    assert (miss["step_s"], miss["mfu"], miss["fits"], miss["peak_gib"]) == (None, None, False, 20.25)


def test_advice():
    found = report.advice(TARGET, [MISS], ["--set mesh.tp=8", "a v3-32"])
    assert found == (
        "v3-8: nothing fits; the nearest, dp 8, needs 20.25 of 15.48 GiB. It would fit with --set mesh.tp=8, or a v3-32"
    )


def test_a_picture(tmp_path):
    report.plot([[FITS, MISS]], str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("row", [FITS, MISS])
def test_progress(row):
    assert report.verdict(row) == ("fits, 8,192 tokens/s" if row.fits else "does not fit")
