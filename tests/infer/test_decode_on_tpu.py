"""The programs of the server for a TPU slice without a TPU: how the cache lies in memory, and what is copied.

The tests need libtpu (docs/benchmarks.md) and are skipped without it.
"""

import copy
import functools
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
# an array of a device's cache, with its layout; S(1) says that a small array is in the fast memory
CACHE = re.compile(r"bf16\[2,8,2,(?:256|512),128\]\{[^}S]*")
# weights of queries, keys or values, transposed
TRANSPOSED = re.compile(r"bf16\[\d,1024,256\]\{1,2,0")


@functools.cache
def compiled(slots: int, *overrides: str) -> dict[str, str]:
    """The texts of the programs of a slice v5e-8, by name."""
    target = tpu_target("v5e-8")
    placement = Placement.of(parse_config(WIDE, ["mesh.tp=8", *overrides]), target.devices()).for_decoding()
    return {one.name: compile_for(one.lowered, target, None).hlo for one in serving.programs(placement, slots)}


def layouts(text: str) -> set[str]:
    """The layouts of the arrays of the cache."""
    return set(CACHE.findall(text))


def copies(text: str) -> list[str]:
    """The instructions that copy an array of the cache into another layout."""
    return [one.name for one in Module(text).instructions.values() if CACHE.search(one.result) and one.opcode == "copy"]


@pytest.mark.parametrize("name", serving.NAMES)
def test_the_cache_lies_in_order_and_is_not_copied(name: str) -> None:
    """A tile holds 8 positions of one head. Tiles of two heads, T(2,128), would be four fifths empty."""
    text = compiled(SLOTS)[name]
    assert layouts(text) == {"bf16[2,8,2,512,128]{4,3,2,1,0:T(8,128)(2,1)"}
    assert copies(text) == []


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
