"""A part of a product of variants that covers it: the default run tests the part, `-m matrix` the whole product.

    FAMILIES, MESHES = ["gptj", "llama"], {"fsdp": [...], "tp": [...]}

    @pytest.mark.parametrize(("family", "mesh"), sampled(FAMILIES, MESHES))

The part rotates with the commit, so that every combination has its turn. The ids of the tests name the chosen ones.
"""

import functools
import itertools
import random
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

_NO_COMMIT = "0"


def sampled(*factors: Iterable[Any], strength: int = 1, at_most: int | None = None) -> list[Any]:
    """The whole product of the factors, for `pytest.mark.parametrize`; what this commit leaves out is marked
    `unsampled`.

    Args:
        factors: the values of each, or a dictionary, of which the keys are taken. Their texts are the ids.
        strength: 1: each value of each factor is in the part; 2: each pair of values of two factors is.
        at_most: combinations of the part that are kept, for long tests: a few commits together cover the product.
    """
    product = list(itertools.product(*factors))
    chosen = covering(product, strength, seed=_commit())[:at_most]
    return [
        pytest.param(
            *values,
            id="-".join(map(str, values)),
            marks=[pytest.mark.matrix, *([] if values in chosen else [pytest.mark.unsampled])],
        )
        for values in product
    ]


def covering(product: Sequence[tuple[Any, ...]], strength: int, seed: str) -> list[tuple[Any, ...]]:
    """Few combinations that contain each `strength` values of different factors that the product contains.

    Greedy: the next one is the first, in an order that the seed shuffles, that adds the most.
    """
    order = list(product)
    random.Random(seed).shuffle(order)
    parts = {values: set(itertools.combinations(enumerate(values), strength)) for values in order}
    missing, chosen = set().union(*parts.values()), []
    while missing:
        chosen.append(max(order, key=lambda values: len(parts[values] & missing)))
        missing -= parts[chosen[-1]]
    return chosen


@functools.cache
def _commit() -> str:
    """The hash of HEAD; a fixed text where there is no repository or no git."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return _NO_COMMIT
    return found.stdout.strip()
