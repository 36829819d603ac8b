"""The segments of a cache: what is written at a position is read there, across the ends of segments."""

import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.ops.attend.cached import SHORTEST_SEGMENT, KVCache, segment_ends
from mesh_transformer.spec import CacheEntry

LENGTH = 3 * SHORTEST_SEGMENT


@pytest.mark.parametrize("first", [0, SHORTEST_SEGMENT - 3, 2 * SHORTEST_SEGMENT - 1])
def test_a_chunk_is_read_where_it_was_written(first: int) -> None:
    """The second sequence begins one position later. All other positions stay zero."""
    entries = CacheEntry(None, 2, 3), CacheEntry(None, 2, 5)
    cache = KVCache.zeros([LENGTH, LENGTH], 2, [entries, entries], jnp.float32)
    positions = np.asarray([[first], [first + 1]]) + np.arange(7, dtype=np.int32)
    random = np.random.default_rng(first)
    new = [random.normal(size=(2, 7, entry.heads, entry.width)).astype(np.float32) for entry in entries]
    view = cache.view(None, LENGTH).write(1, jnp.asarray(positions), *map(jnp.asarray, new))
    assert segment_ends(LENGTH) == [SHORTEST_SEGMENT, 2 * SHORTEST_SEGMENT, LENGTH]
    for layer in (0, 1):
        for number, array in enumerate(new):
            found = np.concatenate([np.asarray(part[number]) for part in view.read(layer)], axis=2)
            expected = np.zeros((2, array.shape[2], LENGTH, array.shape[3]), np.float32)
            for row in (0, 1) if layer == 1 else ():
                expected[row][:, positions[row]] = array[row].swapaxes(0, 1)
            np.testing.assert_array_equal(found, expected)
