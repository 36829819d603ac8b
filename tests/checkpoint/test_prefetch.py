"""`prefetch` changes neither the items nor the errors."""

import threading
from collections.abc import Iterator

import pytest
from support.waiting import LONG_S

from mesh_transformer.checkpoint.tensors import prefetch


def test_items_keep_their_order() -> None:
    assert list(prefetch(iter([]))) == []
    assert list(prefetch(iter([1, None, 2]))) == [1, None, 2]


def test_the_next_item_is_computed_in_a_thread() -> None:
    second = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        second.set()
        yield 2

    for item in prefetch(items()):
        assert item == 2 or second.wait(timeout=LONG_S)


def test_an_error_is_raised_in_place_of_its_item() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("two")

    found = prefetch(items())
    assert next(found) == 1
    with pytest.raises(ValueError, match="two"):
        next(found)
