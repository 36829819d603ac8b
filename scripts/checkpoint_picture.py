"""Draw docs/checkpoint_shards.png: how the arrays of a classic checkpoint lie in its shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TARGET = Path(__file__).resolve().parents[1] / "docs" / "checkpoint_shards.png"
COLOURS = ["#4c72b0", "#dd8452", "#55a868", "#c44e52"]  # of the four shards
WHOLE, UNUSED, TEXT, MUTED = "#d7dbe2", "#eceef1", "#22272e", "#6b7280"
LEFT, RIGHT, GAP = 0.0, 5.3, 1.55  # of the whole, of the first shard, from shard to shard
WIDTH = 11.6


def main() -> None:
    figure, axes = plt.subplots(2, 2, figsize=(13.5, 6.6))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.99, wspace=0.02, hspace=0.02)
    columns(axes[0, 0])
    rows(axes[0, 1])
    summed(axes[1, 0])
    first(axes[1, 1])
    figure.savefig(TARGET, dpi=120, facecolor="white")


def columns(axis: Any) -> None:
    panel(
        axis,
        "Split by columns",
        "attention q, k, v: w   ·   ff in: w, b   ·   head: w, b",
        "Each shard holds some of the outputs: side by side they are the whole.\nDrawn: the w of ff in, of D x 4 D.",
    )
    for shard, colour in enumerate(COLOURS):
        box(axis, LEFT + 0.9 * shard, 0.4, 0.9, 2.2, colour, str(shard))
        box(axis, RIGHT + 0.15 + GAP * shard, 0.4, 0.9, 2.2, colour, str(shard))
    sizes(axis, 3.6, 2.2, "4 D", "D")


def rows(axis: Any) -> None:
    panel(
        axis,
        "Split by rows",
        "embedding: w   ·   attention out: w   ·   ff out: w",
        "Each shard holds some of the inputs: one above the other they are the whole.\nDrawn: the w of ff out, of 4 D x D.",
    )
    for shard, colour in enumerate(COLOURS):
        box(axis, LEFT + 1.2, 2.05 - 0.55 * shard, 1.2, 0.55, colour, str(shard))
        box(axis, RIGHT + GAP * shard, 1.225, 1.2, 0.55, colour, str(shard))
    sizes(axis, 1.2, 2.2, "D", "4 D", left=LEFT + 1.2)


def summed(axis: Any) -> None:
    panel(
        axis,
        "Added up",
        "embedding: b   ·   ff out: b",
        "Every shard adds its bias, then the shards are summed: so are the biases.\n"
        "They are written in equal parts.",
    )
    box(axis, LEFT + 1.2, 1.2, 1.2, 0.6, WHOLE, "b")
    for shard, colour in enumerate(COLOURS):
        box(axis, RIGHT + GAP * shard, 1.2, 1.2, 0.6, colour, "b / 4")
        if shard:
            axis.text(
                RIGHT + GAP * shard - 0.175, 1.5, "+", ha="center", va="center", fontsize=15, color=TEXT
            )
    sizes(axis, 1.2, 0.6, "D", "", left=LEFT + 1.2, bottom=1.2)


def first(axis: Any) -> None:
    panel(
        axis,
        "The first shard's",
        "layer norm: scale, offset",
        "All shards compute with shard_0's. The others keep their first values, scale 1 and\n"
        "offset 0, and are never used. (rmsnorm and scalenorm: the mean of all shards.)",
    )
    box(axis, LEFT + 1.2, 1.2, 1.2, 0.6, COLOURS[0], "scale", "white")
    for shard in range(len(COLOURS)):
        colour, text = (COLOURS[0], "scale") if shard == 0 else (UNUSED, "1")
        box(axis, RIGHT + GAP * shard, 1.2, 1.2, 0.6, colour, text, "white" if shard == 0 else MUTED)
    sizes(axis, 1.2, 0.6, "D", "", left=LEFT + 1.2, bottom=1.2)


def panel(axis: Any, title: str, names: str, explanation: str) -> None:
    """A panel without its boxes: headings, an arrow from the whole to the shards, an explanation."""
    axis.set(xlim=(-0.9, WIDTH), ylim=(-1.4, 4.7), aspect="equal")
    axis.axis("off")
    axis.text(-0.7, 4.3, title, fontsize=15, fontweight="bold", color=TEXT, va="center")
    axis.text(-0.7, 3.7, names, fontsize=10.5, color=MUTED, va="center")
    axis.text(-0.7, -0.2, explanation, fontsize=11, color=TEXT, va="top", linespacing=1.4)
    axis.annotate("", (4.95, 1.5), (3.95, 1.5), arrowprops={"arrowstyle": "<->", "color": TEXT, "lw": 1.4})
    heads = [(LEFT + 1.8, "the whole")] + [(RIGHT + GAP * i + 0.6, f"shard_{i}") for i in range(len(COLOURS))]
    for x, text in heads:
        axis.text(x, 3.1, text, ha="center", fontsize=10.5, color=TEXT)


def box(
    axis: Any, x: float, y: float, width: float, height: float, colour: str, text: str, ink: str = ""
) -> None:
    axis.add_patch(plt.Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.5))
    ink = ink or (TEXT if colour == WHOLE else "white")
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=10.5, color=ink)


def sizes(
    axis: Any, width: float, height: float, across: str, down: str, left: float = LEFT, bottom: float = 0.4
) -> None:
    """The sizes of the whole, above it and beside it."""
    axis.text(left + width / 2, bottom + height + 0.12, across, ha="center", fontsize=10, color=MUTED)
    axis.text(left - 0.15, bottom + height / 2, down, ha="right", va="center", fontsize=10, color=MUTED)


if __name__ == "__main__":
    main()
