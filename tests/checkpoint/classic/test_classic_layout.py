"""The order of the arrays in a classic shard, compared with the observed order, which is written out here."""

import re

import pytest

from mesh_transformer.checkpoint.classic.folder import group_by_file, leaves
from mesh_transformer.config import load_config, parse_config

LAYERS_12 = [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
LAYERS_28 = [
    0, 1, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 2, 20, 21, 22, 23, 24, 25, 26, 27, 3, 4, 5, 6, 7, 8, 9,
]  # fmt: skip
BEFORE = ["embedding_shard/~/linear/b", "embedding_shard/~/linear/w"]
# v (linear_1) comes before k (linear_2); b before w
BLOCK = [
    ("linear/w", "q/w"),
    ("linear_1/w", "v/w"),
    ("linear_2/w", "k/w"),
    ("linear_3/w", "o/w"),
    ("linear_4/b", "in/b"),
    ("linear_4/w", "in/w"),
    ("linear_5/b", "ff_out/b"),
    ("linear_5/w", "out/w"),
    ("replicated_layer_norm/offset", "norm/offset"),
    ("replicated_layer_norm/scale", "norm/scale"),
]
AFTER = [
    "projection_shard/~/linear/b",
    "projection_shard/~/linear/w",
    "projection_shard/~/replicated_layer_norm/offset",
    "projection_shard/~/replicated_layer_norm/scale",
]


def table(layers: list[int]) -> list[str]:
    """The names of the parameters, without their common prefix."""
    blocks = [f"layer_{layer}/~/{name}" for layer in layers for name, _ in BLOCK]
    return [*BEFORE, *blocks, *AFTER]


def model(layers: int):
    return parse_config({"layers": layers, "d_model": 16, "n_heads": 4, "n_vocab": 24, "seq": 8, "pe": "rotary"}).model


@pytest.mark.parametrize(("layers", "order"), [(12, LAYERS_12), (28, LAYERS_28)])
def test_order(layers, order):
    prefix = "causal_transformer_shard/~/"
    slim = [leaf.name for leaf in leaves(model(layers), full=False)]
    assert slim == [*(f"params/{prefix}{name}" for name in table(order)), "step"]
    moments = [[f"opt_state[2].{kind}/{prefix}{name}" for name in table(order)] for kind in ("mu", "nu")]
    full = [leaf.name for leaf in leaves(model(layers), full=True)]
    assert full == ["opt_state[2].count", *moments[0], *moments[1], "opt_state[5].count", *slim]


@pytest.mark.parametrize(("layers", "order"), [(12, LAYERS_12), (28, LAYERS_28)])
def test_each_array_has_the_layer_of_its_name(layers, order):
    found = leaves(model(layers), full=False)[len(BEFORE) : -len(AFTER) - 1]
    expected = [(layer, tensor) for layer in order for _, tensor in BLOCK]
    assert [(leaf.layer, "/".join(leaf.tensor.split("/")[-2:])) for leaf in found] == expected


def test_files_of_gpt_j():
    """861 arrays in 16 files: 53 each, and one more in the first 13. A slim checkpoint has 287."""
    assert [len(part) for part in group_by_file(leaves(model(28), full=True))] == [54] * 13 + [53] * 3
    assert [len(part) for part in group_by_file(leaves(model(28), full=False))] == [18] * 15 + [17]


def test_fewer_arrays_than_files():
    parts = group_by_file(leaves(model(1), full=False)[:3])
    assert [len(part) for part in parts] == [1, 1, 1] + [0] * 13


@pytest.mark.parametrize(("section", "full"), [("FULL", True), ("SLIM", False)])
def test_the_observed_table(original, section, full):
    """Each line of ORDER.md: file, key, name and shape of one shard of eight."""
    text = (original / "ORDER.md").read_text().split(f"### {section} checkpoint")[1].split("###")[0]
    rows = re.findall(r"\| \d+ \| (\d+)\.npz \| arr_(\d+) \| `([^`]+)` \| \(([^)]*)\)", text)
    config = load_config(str(original / "configs/tiny_mp8.json"), []).model
    found = [
        (str(number), str(key), leaf.name, re.sub(r"[()]", "", str(leaf.shard_shape(8))))
        for number, part in enumerate(group_by_file(leaves(config, full=full)))
        for key, leaf in enumerate(part)
    ]
    assert found == rows
    assert len(rows) == (111 if full else 37)
