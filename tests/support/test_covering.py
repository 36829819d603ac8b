"""The part of a product that the default run tests."""

import itertools
import subprocess

import pytest

from support import covering
from support.covering import sampled

FACTORS = ["abcde", [1, 2, 3], [True, False]]
PRODUCT = list(itertools.product(*FACTORS))


def parts(combinations, strength):
    return {part for values in combinations for part in itertools.combinations(enumerate(values), strength)}


@pytest.mark.parametrize(("strength", "at_least", "at_most"), [(1, 5, 5), (2, 15, 20), (3, 30, 30)])
@pytest.mark.parametrize("seed", ["0", "c0ffee"])
def test_every_value_or_pair_is_in_the_part(strength, at_least, at_most, seed):
    chosen = covering.covering(PRODUCT, strength, seed)
    assert parts(chosen, strength) == parts(PRODUCT, strength)
    assert at_least <= len(chosen) <= at_most
    assert len(set(chosen)) == len(chosen)


def test_the_part_is_the_same_for_a_commit_and_rotates_with_commits():
    chosen = [covering.covering(PRODUCT, 1, str(seed)) for seed in range(40)]
    assert chosen[7] == covering.covering(PRODUCT, 1, "7")
    assert set().union(*chosen) == set(PRODUCT)


def test_a_product_with_holes_is_covered_as_far_as_it_goes():
    some = [values for values in PRODUCT if values[0] != "a" or values[1] == 1]
    assert parts(covering.covering(some, 2, "0"), 2) == parts(some, 2)


def test_all_are_marked_and_the_rest_is_left_out():
    params = sampled(*FACTORS[:2])
    assert [param.values for param in params] == list(itertools.product(*FACTORS[:2]))
    marks = {param.id: {mark.name for mark in param.marks} for param in params}
    assert all("matrix" in names for names in marks.values())
    taken = [param.values for param in params if "unsampled" not in marks[param.id]]
    assert len(taken) == 5
    assert parts(taken, 1) == parts(itertools.product(*FACTORS[:2]), 1)


def test_without_git_the_part_is_fixed(monkeypatch):
    def absent(*_, **__):
        raise FileNotFoundError("git")

    covering._commit.cache_clear()
    monkeypatch.setattr(subprocess, "run", absent)
    assert covering._commit() == "0"
    covering._commit.cache_clear()


def test_a_part_may_be_bounded():
    kept = [one for one in sampled(*FACTORS, at_most=2) if len(one.marks) == 1]
    assert len(kept) == 2
