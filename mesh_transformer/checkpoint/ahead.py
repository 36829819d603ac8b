"""Reading, converting and writing at the same time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_END = object()


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items; the next one is made in a thread while the caller works on this one. Errors come in their place."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, _END)
        while (item := coming.result()) is not _END:
            coming = pool.submit(next, items, _END)
            yield item  # type: ignore[misc]
