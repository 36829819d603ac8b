"""The pictures in the folder of a run, from metrics that are written here."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from mesh_transformer.runtime.training import expert_load, plots

Draw = Callable[[Callable[[str], None], Mapping[int, dict[str, float]]], Figure]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Writes metrics into the folder `mine` and plots them. Returns the figure, whose PNG is written too."""
    figures: list[Any] = []
    write = plots.write_png
    monkeypatch.setattr(plots, "write_png", lambda figure, path: (figures.append(figure), write(figure, path)))
    folder = tmp_path / "mine"
    folder.mkdir()

    def draw(plot: Callable[[str], None], metrics: Mapping[int, dict[str, float]]) -> Figure:
        lines = (json.dumps({"step": step, **scalars}) for step, scalars in metrics.items())
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        plot(str(folder))
        assert all(Image.open(path).width >= 960 for path in folder.glob("*.png"))
        figures[-1].draw_without_rendering()
        return figures[-1]

    return draw


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def falling(steps: int) -> dict[int, dict[str, float]]:
    """Metrics that fall from 6 to 2 in the first twentieth, and slowly to 1.5 after it."""
    losses = np.interp(range(1, steps + 1), [1, max(steps / 20, 2), max(steps, 3)], [6.0, 2.0, 1.5])
    return {step: {"train/loss": float(loss)} for step, loss in enumerate(losses, 1)}


def test_the_loss_is_scaled_to_what_follows_the_first_steps(drawn: Draw) -> None:
    """The legend says what is above the frame. The points of the validation are always inside."""
    metrics = falling(400)
    metrics[400]["val/loss_held"] = 2.4
    (axes,) = drawn(plots.plot_losses, metrics).axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("Loss of mine", "step", "loss (nats per token)")
    assert legend(axes) == ["training (up to 6.00, in step 1)", "validation: held"]
    low, high = axes.get_ylim()
    assert 1.2 < low < 1.5
    assert 2.4 < high < 2.8


@pytest.mark.parametrize("steps", [1, 19, 400])
def test_the_whole_loss_is_shown_where_no_step_is_far_above(drawn: Draw, steps: int) -> None:
    metrics = falling(steps)
    if steps == 400:
        # as of a run that diverges
        metrics |= {step: {"train/loss": 7.0} for step in range(300, 401)}
    (axes,) = drawn(plots.plot_losses, metrics).axes
    assert legend(axes) == ["training"]
    low, high = axes.get_ylim()
    assert all(low < scalars["train/loss"] < high for scalars in metrics.values())
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_the_learning_rate_is_below_the_loss(drawn: Draw) -> None:
    metrics = falling(30)
    for step, scalars in metrics.items():
        scalars |= {"train/learning_rate": step / 100, "experts/balance_loss": 1.0}
    loss, balance, rate, empty = drawn(plots.plot_losses, metrics).axes
    assert [panel.get_ylabel() for panel in (loss, rate)] == ["loss (nats per token)", "learning rate"]
    assert balance.get_title() == "Balance of its experts"
    (line,) = rate.get_lines()
    assert list(line.get_ydata()) == [step / 100 for step in metrics]
    assert (rate.get_legend(), rate.get_ylim()[0], empty.axison) == (None, 0, False)


def test_step_0_of_a_fine_tuning_is_the_first_point(drawn: Draw) -> None:
    validations = {0: 1.6, 50: 2.2, 100: 2.3}
    metrics = {0: {}, **falling(100)}
    for step, loss in validations.items():
        metrics[step]["val/loss_old"] = loss
    (axes,) = drawn(plots.plot_losses, metrics).axes
    line = axes.get_lines()[1]
    assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == validations
    assert line.get_marker() == "o"
    assert axes.get_ylim()[0] < 1.5


@pytest.mark.parametrize(("layers", "experts"), [(4, 16), (2, 4), (16, 32)])
def test_the_cells_of_the_experts_are_square_and_the_steps_are_whole(
    drawn: Draw, tmp_path: Path, layers: int, experts: int
) -> None:
    expert_load.append(str(tmp_path / "mine"), 20, {"held": np.ones((layers, experts))})
    metrics = {step: {"experts/largest_load": 2.0, "experts/smallest_load": 0.5} for step in range(1, 21)}
    above, below, *_ = drawn(plots.plot_experts, metrics).axes
    assert above.get_title() == "Load of the experts of mine\nvalidation on held after step 20"
    assert legend(below) == ["largest of all experts", "smallest of all experts"]
    assert "Training" not in (above.get_title(), below.get_title())
    frame = above.get_window_extent()
    assert (frame.width / experts) / (frame.height / layers) == pytest.approx(1, abs=0.35)
    for axis in (above.xaxis, above.yaxis, below.xaxis):
        assert all(float(tick).is_integer() for tick in axis.get_majorticklocs())
