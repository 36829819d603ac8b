"""The fixed part of each product of variants that every run tests. The others are marked nightly and variant.

FAMILIES, MESHES = ["gptj", "llama"], {"fsdp": [...], "tp": [...]}

@pytest.mark.parametrize(("family", "mesh"), covering(FAMILIES, MESHES))
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs


def covering(*factors: Iterable[Any], pairs: bool = False, daily: Sequence[Iterable[Any]] | None = None) -> list[Any]:
    """The whole product of the factors, for `pytest.mark.parametrize`, all marked but for a covering.

    Args:
        factors: the values of each, or a dictionary, whose keys are taken. Their texts are the ids.
        pairs: whether the covering has each pair of values of two factors, or each value only.
        daily: the values of each factor that the covering has; None: all. A product whose cases take over ten seconds
            names those that reach other lines of the package.
    """
    values = [list(factor) for factor in factors]
    covered = values if daily is None else [list(factor) for factor in daily]
    if pairs:
        cases = {tuple(case) for case in AllPairs(covered)}
    else:
        cases = {tuple(one[row % len(one)] for one in covered) for row in range(max(map(len, covered)))}
    rest = [pytest.mark.nightly, pytest.mark.variant]
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=[] if case in cases else rest)
        for case in itertools.product(*values)
    ]
