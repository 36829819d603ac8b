"""The output of preflight.py for given predictions."""

import dataclasses
import itertools
import json

import pytest
from matplotlib import figure
from matplotlib.figure import Figure

from mesh_transformer.estimate.prediction import Prediction
from mesh_transformer.estimate.target import Target, tpu_target
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


def test_what_no_other_column_has_is_a_column(capsys, monkeypatch):
    """Two rows of a search that differ in nothing else."""
    changes = [*FITS.set, "data.batch_size=8", "compute.remat=full"]
    shard = dataclasses.replace(FITS, best=False, set=[*changes, "mesh.shard_activations=true"])
    moments = dataclasses.replace(FITS, best=False, set=[*changes, "optimizer.moments_dtype=bfloat16"])
    report.print_table([[dataclasses.replace(FITS, set=changes), shard, moments]], [TARGET], Costs(21600, None))
    lines = capsys.readouterr().out.splitlines()
    place = lines[0].index("options")
    assert [line[place:].split("  ")[0] for line in lines[:4]] == [
        "options", "", "shard_activations", "moments_dtype bfloat16",
    ]  # fmt: skip
    labels = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: labels.extend(self.axes[0].get_yticklabels()))
    report.plot([[FITS, shard]], "p.png", "")
    texts = [label.get_text() for label in labels]
    assert "fsdp 4 tp 2, full, shard_activations\n" in texts[0]
    assert "fsdp 4 tp 2, full\n" in texts[1]


def test_a_table_by_formula(capsys, monkeypatch):
    """Each time is marked, and the last line says what to install; beside compiled rows, both lines stand."""
    monkeypatch.setattr(Target, "missing_compiler", "libtpu (pip install -e '.[tpu]')")
    formula = dataclasses.replace(FITS, estimate="formula")
    report.print_table([[formula]], [TARGET], Costs(21600, None))
    text = capsys.readouterr().out
    assert "4 s (formula)" in text
    assert text.splitlines()[-1].startswith("Formula only, without libtpu (pip install")
    assert "pip install -e '.[tpu]'" in text
    assert "the compiler's own count" not in text
    report.print_table([[formula], [FITS]], [TARGET, TARGET], Costs(21600, None))
    text = capsys.readouterr().out
    assert "Formula only" in text
    assert "the compiler's own count" in text


def test_json_has_the_documented_keys(capsys):
    report.print_json(FITS, TARGET, Costs(21600, None))
    report.print_json(MISS, TARGET, Costs(21600, None))
    fits, miss = map(json.loads, capsys.readouterr().out.splitlines())
    keys = (
        "slice mesh microbatch accumulation remat sequences fits peak_gib usable_gib step_s step_s_range tokens_per_s "
    )
    keys += "op_table "
    assert set((keys + "mfu parts set best reason memory_gib program estimate notes days cost").split()) == set(fits)
    assert list(fits["mesh"]) == ["pp", "dp", "fsdp", "cp", "ep", "tp"]
    assert (fits["days"], fits["cost"], fits["best"]) == (1.0, None, True)
    assert (miss["step_s"], miss["mfu"], miss["fits"], miss["peak_gib"]) == (None, None, False, 20.25)


def test_advice():
    found = report.advice(TARGET, [MISS], ["--set mesh.tp=8", "a v3-32"])
    assert found == (
        "v3-8: nothing fits; the nearest, dp 8, needs 20.25 of 15.48 GiB. It would fit with --set mesh.tp=8, or a v3-32"
    )


TINY = dataclasses.replace(
    FITS,
    memory_gib={"parameters": 0.003, "moments": 0.006, "activations": 2e-7},
    step_s=3e-4,
    parts={"products": 2e-4, "attention": 1e-4, "waiting": 1e-12},
)


def test_small_parts_have_their_own_unit(capsys):
    report.print_table([[TINY]], [TARGET], Costs(1, None))
    shown = capsys.readouterr().out
    assert "v3-8 train, MiB of a device: parameters 3.07, moments 6.14\n" in shown
    assert "v3-8 train, predicted microseconds: products 200.000, attention 100.000\n" in shown


def test_the_parameters_are_named_even_if_they_round_to_zero(capsys):
    row = dataclasses.replace(FITS, memory_gib={"parameters": 0.001, "moments": 0.0, "activations": 3.0})
    report.print_table([[row]], [TARGET], Costs(1, None))
    assert "GiB of a device: parameters 0.00, activations 3.00\n" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [[[TINY]], [[MISS]], [[FITS, MISS], [TINY] * 8]], ids=["one", "no time", "many"])
def test_nothing_in_the_picture_covers_anything_else(rows, tmp_path, monkeypatch):
    """Titles, legends, labels of ticks and bars of a panel have room: the legend is below the title, and the longest
    bar ends inside the frame."""
    drawn, write = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *to, **how: (drawn.append(figure), write(figure, *to, **how)))
    report.plot(rows, str(tmp_path / "a.png"), "tiny.json: gptj, 4 layers of width 128; sequences of 128 tokens")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    figure.draw_without_rendering()
    assert figure.get_suptitle().startswith("tiny.json: gptj")
    for axes in figure.axes:
        frame, title = axes.get_window_extent(), axes.title.get_window_extent()
        assert title.y1 < figure._suptitle.get_window_extent().y0
        if legend := axes.get_legend():
            assert frame.y1 < legend.get_window_extent().y0
            assert legend.get_window_extent().y1 < title.y0
        assert all(bar.get_window_extent().x1 < frame.x1 - 1 for bar in axes.patches)
        ticks = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(ticks))


@pytest.mark.parametrize("row", [FITS, MISS])
def test_progress(row):
    assert report.verdict(row) == ("fits, 8,192 tokens/s" if row.fits else "does not fit")
