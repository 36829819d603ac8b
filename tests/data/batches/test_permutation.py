"""The order of a pass over a source: a bijection, without memory of it, that looks random and never changes."""

import numpy as np
import pytest

from mesh_transformer.data.batches.permutation import Permutation


def order(size, seed):
    permutation = Permutation(size, seed)
    return np.array([permutation[i] for i in range(size)])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 63, 64, 65, 1000, 4099])
def test_each_index_comes_once(size):
    assert sorted(order(size, "a")) == list(range(size))


def test_the_order_of_stored_positions_stays():
    """A change of these numbers would send every stored position of a run to other records."""
    assert order(8, "0 0 pile").tolist() == [6, 1, 0, 5, 3, 4, 7, 2]
    assert [Permutation(10**12, "5 1 code")[i] for i in (0, 1, 10**12 - 1)] == [
        243856627564,
        607139641321,
        628432842523,
    ]


def test_an_index_outside_is_refused():
    with pytest.raises(IndexError, match="3 is not in 0..2"):
        Permutation(3, "a")[3]


def test_distances_of_neighbours_are_uniform():
    """Pearson's chi2 of 63 degrees of freedom is 63 +- 11; beyond 130 lies 1 of a million random orders."""
    size = 20_011
    bins = np.histogram(np.diff(order(size, "s")) % size, 64, (0, size))[0]
    assert ((bins - bins.mean()) ** 2 / bins.mean()).sum() < 130


def test_two_orders_are_uncorrelated():
    """The correlation of two random orders has the deviation 1 / sqrt(size): 5 of them."""
    size = 20_011
    orders = [np.arange(size), order(size, "5 0 pile"), order(size, "5 1 pile"), order(size, "6 0 pile")]
    found = np.corrcoef(orders)[np.triu_indices(4, 1)]
    assert np.abs(found).max() < 5 / size**0.5
