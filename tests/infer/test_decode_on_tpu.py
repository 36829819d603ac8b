"""The programs of the server for a TPU slice without a TPU: how the cache lies in memory, and what is copied.

The tests need libtpu (docs/benchmarks.md) and are skipped without it.
"""

import copy
import functools
import math
import re

import pytest
from support.builders import TINY

from mesh_transformer.config import parse_config
from mesh_transformer.estimate import serving
from mesh_transformer.estimate.hlo import Module
from mesh_transformer.estimate.programs import compile_for
from mesh_transformer.estimate.target import tpu_target
from mesh_transformer.models.placement import Placement
from mesh_transformer.ops.attend import storage

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("libtpu")]
# two heads for each of eight devices, as GPT-J-6B has
WIDE = copy.deepcopy(TINY)
WIDE["model"] |= {"layers": 2, "d_model": 1024, "n_heads": 16, "d_head": 128, "seq": 512}
SLOTS = 8
# an array of a device's cache, (L, N, J, S, K) or (L, N, J, K, S), with its layout; S(1) says that a small array is in
# the fast memory
CACHE = re.compile(r"bf16\[2,\d+,2,(?:(?:256|512),\d+|\d+,512)\]\{[^}S]*")
TILED = re.compile(r"bf16\[([\d,]+)\]\{([\d,]+):T\((\d+),(\d+)\)")
# weights of queries, keys or values, transposed
TRANSPOSED = re.compile(r"bf16\[\d,1024,256\]\{1,2,0")


@functools.cache
def compiled(slots: int, *overrides: str) -> dict[str, str]:
    """The texts of the programs of a slice v5e-8, by name."""
    return _compiled("v5e-8", slots, "mesh.tp=8", *overrides)


@functools.cache
def decode(slots: int, head: int) -> str:
    """The text of the program that decodes on one chip, with two heads of `head` numbers."""
    sizes = "model.d_model=256", "model.n_heads=2", f"model.d_head={head}"
    return _compiled("v5e-1", slots, "mesh.tp=1", *sizes, only="decode")["decode"]


def _compiled(name: str, slots: int, *overrides: str, only: str | None = None) -> dict[str, str]:
    target = tpu_target(name)
    placement = Placement.of(parse_config(WIDE, overrides), target.devices()).for_decoding()
    programs = [one for one in serving.programs(placement, slots) if only in (None, one.name)]
    return {one.name: compile_for(one.lowered, target, None).hlo for one in programs}


def layouts(text: str) -> set[str]:
    """The layouts of the arrays of the cache."""
    return set(CACHE.findall(text))


def stored_bytes(layout: str) -> int:
    """The bytes of an array of bfloat16 in memory, with the columns and rows that fill its tiles."""
    match = TILED.match(layout)
    assert match is not None
    shape, order, tile = ([int(n) for n in part.split(",")] for part in (match[1], match[2], f"{match[4]},{match[3]}"))
    return 2 * math.prod(
        -(-shape[dimension] // size) * size for dimension, size in zip(order, [*tile, 1, 1, 1], strict=True)
    )


def copies(text: str) -> list[str]:
    """The instructions that copy an array of the cache into another layout."""
    return [one.name for one in Module(text).instructions.values() if CACHE.search(one.result) and one.opcode == "copy"]


@pytest.mark.parametrize("name", serving.NAMES)
def test_the_cache_lies_in_order_and_is_not_copied(name: str) -> None:
    """A tile holds 8 positions of one head. Tiles of two heads, T(2,128), would be four fifths empty."""
    text = compiled(SLOTS)[name]
    assert layouts(text) == {"bf16[2,8,2,512,128]{4,3,2,1,0:T(8,128)(2,1)"}
    assert copies(text) == []


@pytest.mark.parametrize(("head", "slots"), [(64, 8), (80, 8), (96, 8), (256, 8), (64, 1), (64, 64)])
def test_a_cache_of_narrow_heads_is_not_copied_and_has_no_padding(head: int, slots: int) -> None:
    """Tiles have 128 columns: those of positions by 64 numbers would be half empty. libtpu copied such a cache into
    another order in each call, for two thirds of the time of a call of one step."""
    text = decode(slots, head)
    assert copies(text) == []
    arrays = layouts(text)
    assert arrays
    assert all(stored_bytes(array) <= 1.05 * 2 * 2 * slots * 2 * 512 * head for array in arrays)


def test_weights_are_not_transposed_to_be_divided_into_heads() -> None:
    assert not TRANSPOSED.search(compiled(SLOTS)["decode"])


@pytest.mark.nightly
def test_the_checks_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scatter of all heads of a position writes the cache of other platforms."""
    monkeypatch.setattr(storage, "_STORAGES", {})
    text = compiled(SLOTS, "compute.scan_unroll=1")["decode"]
    assert any("T(2,128)" in layout for layout in layouts(text))
    assert copies(text)
    assert TRANSPOSED.search(text)


def test_a_single_slot_has_eight_rows() -> None:
    """Eight rows stand for the sequence in all products of weights: the matrix unit computes them."""
    text = compiled(1)["decode"]
    assert "bf16[1,8,256]" in text or "bf16[8,256]" in text
    assert "bf16[1,1,256]" not in text
