"""What is written at a position of a cache is read there: across the ends of segments, around a ring, and as each
platform stores it."""

import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.ops.attend import storage
from mesh_transformer.ops.attend.cached import SHORTEST_SEGMENT, KVCache, segment_ends
from mesh_transformer.ops.attend.storage import Scattered, Storage, Tiled
from mesh_transformer.spec import CacheEntry

LENGTH = 3 * SHORTEST_SEGMENT
ENTRIES = CacheEntry(None, 2, 3), CacheEntry(None, 2, 5)


class TiledSegments(Tiled):
    """Several segments, as a cache may have them that CPU code made."""

    copies_slices = True


@pytest.fixture(params=[Scattered(), Tiled(), TiledSegments()], ids=lambda stored: type(stored).__name__)
def stored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setitem(storage._STORAGES, "cpu", request.param)
    return request.param


def written(cache: KVCache, length: int, positions_BT: np.ndarray, slots: list[int] | None = None) -> list[np.ndarray]:
    """Fill layer 1 of a cache of zeros at these positions. Returns the entries of layers 0 and 1, and what was
    written."""
    random = np.random.default_rng(positions_BT[0, 0])
    new = [random.normal(size=(*positions_BT.shape, e.heads, e.width)).astype(np.float32) for e in ENTRIES]
    view = cache.view(None if slots is None else jnp.asarray(slots), length, write=np.asarray([True, True]))
    view = view.write(1, jnp.asarray(positions_BT), *map(jnp.asarray, new))
    whole = view.cache.view(None, length)
    layers = [
        [np.concatenate([np.asarray(part[number]) for part in whole.read(layer)], axis=2) for number in (0, 1)]
        for layer in (0, 1)
    ]
    return [*layers, new]


@pytest.mark.parametrize("first", [0, SHORTEST_SEGMENT - 3, 2 * SHORTEST_SEGMENT - 1])
@pytest.mark.parametrize("count", [1, 7, SHORTEST_SEGMENT + 5])
def test_a_chunk_is_read_where_it_was_written(first: int, count: int, stored: Storage) -> None:
    """The second sequence begins one position later. All other positions stay zero."""
    cache = KVCache.zeros([LENGTH, LENGTH], 2, [ENTRIES, ENTRIES], jnp.dtype(np.float32))
    positions = np.asarray([[first], [first + 1]]) + np.arange(min(count, LENGTH - first - 1), dtype=np.int32)
    below, above, new = written(cache, LENGTH, positions)
    assert segment_ends(LENGTH) == [SHORTEST_SEGMENT, 2 * SHORTEST_SEGMENT, LENGTH]
    assert len(cache.groups[0]) == (3 if stored.copies_slices else 1)
    for zeros, found, array in zip(below, above, new, strict=True):
        assert not zeros.any()
        expected = np.zeros((2, array.shape[2], LENGTH, array.shape[3]), np.float32)
        for row in (0, 1):
            expected[row][:, positions[row]] = array[row].swapaxes(0, 1)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("first", "count"), [(0, 11), (7, 5), (2 * 11 + 3, 8), (3 * 11 + 4, 1)])
def test_a_ring_continues_at_its_start(first: int, count: int, stored: Storage) -> None:
    """The slots of the sequences are in the other order."""
    size = 11
    cache = KVCache.zeros([size, size], 3, [ENTRIES, ENTRIES], jnp.dtype(np.float32))
    positions = np.asarray([[first], [first + 1]]) + np.arange(count, dtype=np.int32)
    _, above, new = written(cache, 64, positions % size, slots=[2, 0])
    for found, array in zip(above, new, strict=True):
        expected = np.zeros((3, array.shape[2], size, array.shape[3]), np.float32)
        for row, slot in enumerate([2, 0]):
            expected[slot][:, positions[row] % size] = array[row].swapaxes(0, 1)
        np.testing.assert_array_equal(found, expected)
