"""The load of routed experts in a run: its file, its picture, and the picture in TensorBoard's events."""

import io
import json

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image
from support.commands import metrics, write_run
from support.events import read_events
from support.families import MODELS

from mesh_transformer.config import load_config
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.training import expert_load, plots, trainer
from mesh_transformer.runtime.training.start import TuningSource

EVEN, TOKENS = {"held": np.ones((2, 4))}, 2 * 8 * 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of four steps with two validations of two batches."""
    made = tmp_path_factory.mktemp("balance")
    path = write_run(
        made,
        optimizer={"total_steps": 4, "gradient_accumulation_steps": 1},
        data={"val_every": 2},
        checkpoint={"ckpt_every": 4, "keep_every": 4},
        logging={"tensorboard": True, "plot": True},
    )
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({**config, "model": {**MODELS["mixtral"], "layers": 2, "d_model": 16, "n_vocab": 257, "seq": 16}})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        assert trainer.train(load_config("config.json"), TuningSource()).code == 0
    return made


def test_each_validation_counts_the_tokens_of_its_batches(folder):
    config = load_config(str(folder / "config.json")).model
    records = [json.loads(line) for line in (folder / "run/experts.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 4]
    for record in records:
        (load,) = record["load"].values()
        choices = TOKENS * config.experts_per_token
        counts = np.array(load) * choices / config.n_experts
        assert counts.shape == (config.layers, config.n_experts)
        np.testing.assert_allclose(counts.sum(1), choices, rtol=1e-3)  # four digits in the file
        np.testing.assert_allclose(counts, counts.round(), atol=0.1)
        # the counts of one batch alone, in the units of two, are even
        assert (counts.round() % 2).any()


def test_the_pictures_of_a_run(folder):
    """The one at the end has also the loads of the last step."""
    for name, width in (("loss.png", 16), ("experts.png", 8)):
        picture = Image.open(folder / "run" / name)
        assert picture.width == width * 120
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 20
    assert "experts/balance_loss" in metrics(folder / "run")[-1]
    found = [
        (event.step, value.image)
        for event in read_events(folder / "run/tensorboard")
        for value in event.summary.value
        if value.tag == "experts/load"
    ]
    assert [step for step, _ in found] == [2, 4]
    for _, image in found:
        picture = Image.open(io.BytesIO(image.encoded_image_string))
        assert (picture.format, picture.mode, picture.size) == ("PNG", "RGBA", (image.width, image.height))
        assert image.colorspace == len(picture.mode)


def test_a_resume_removes_half_a_record_and_unfinished_pictures_and_logs_changed_options(folder, monkeypatch, caplog):
    monkeypatch.chdir(folder)
    path = folder / "run/experts.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"step": 6, "load": {"held": [[0.5, 1.')
    # what a kill during a drawing leaves
    for name in ("loss.png.tmp", "experts.png.tmp"):
        (folder / "run" / name).write_bytes(b"\x89PNG")
    caplog.set_level("INFO")
    # without plots, so that no drawing replaces the unfinished pictures
    changes = ["experts.z_loss=0.5", "mesh.fsdp=2", "logging.plot=false"]
    assert trainer.train(load_config("config.json", changes), TuningSource()).step == 4
    assert path.read_bytes() == before
    assert not list((folder / "run").glob("*.tmp"))
    assert (
        "resuming with changed options: experts.z_loss 0.001 -> 0.5, mesh.dp 8 -> 4, mesh.fsdp 1 -> 2"
        in caplog.messages
    )


def test_the_colour_is_the_load(tmp_path):
    """The cells of equal load have their colour, and each cell the same area."""
    expert_load.append(str(tmp_path), 3, {"held": np.array([[4.0, 0, 0, 0], [1, 1, 1, 1]])})
    plots.plot_experts(str(tmp_path))
    pixels = np.asarray(Image.open(tmp_path / "experts.png").convert("RGB"))

    def area(value):
        return (pixels == np.array(colormaps["coolwarm"](value, bytes=True)[:3])).all(-1).sum()

    cell = area(1.0)
    assert cell > 5000
    assert [area(0.0) / cell, area(0.5) / cell] == pytest.approx([3, 4], rel=0.1)


def test_the_newest_record_is_the_last_one(tmp_path):
    """Also if its step is repeated; a line that is no record is not read."""
    folder = str(tmp_path)
    assert expert_load.newest(folder) is None
    for step, factor in ((5, 1), (10, 2), (5, 3)):
        expert_load.append(folder, step, {name: factor * table for name, table in EVEN.items()})
    path = tmp_path / "experts.jsonl"
    whole = path.read_bytes()
    for broken in ('{"a": [[1], [1, 2]]}', '{"a": [[]]}', '{"a": [["1"]]}', '{"a": [[Infinity]]}', "{}", "[[1]]"):
        path.write_bytes(whole + f'{{"step": 6, "load": {broken}}}\n'.encode())
        step, load = expert_load.newest(folder)
        assert step == 5
        np.testing.assert_array_equal(load["held"], np.full((2, 4), 3.0))
        expert_load.cut_broken_end(folder)
        assert path.read_bytes() == whole
    path.write_text("mine\n")
    with pytest.raises(UserError, match=r"experts\.jsonl has no record"):
        expert_load.cut_broken_end(folder)


def test_an_error_in_a_plot_is_a_warning(caplog):
    shown = []

    def fail():
        raise ValueError("no room")

    plots.Plot("loss", fail, 0).update(lambda: shown.append(1))
    plots.Plot("experts", lambda: shown.append(2), 0).update(fail)
    assert caplog.messages == ["the loss plot failed: no room", "the experts plot failed: no room"]
    assert shown == [2]


def test_a_plot_waits_for_its_turn():
    drawn = []
    plot = plots.Plot("loss", lambda: drawn.append(1), 60)
    plot.update()
    assert not drawn
    plot.update(last=True)
    assert drawn
