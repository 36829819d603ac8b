"""A part of each product of variants: the default run tests the part, `-m matrix` the whole products.

    FAMILIES, MESHES = ["gptj", "llama"], {"fsdp": [...], "tp": [...]}

    @pytest.mark.parametrize(("family", "mesh"), sampled(FAMILIES, MESHES, seconds=9, files=("train/step.py",)))

The part follows the change (`choose`): combinations that test a changed file come first, whole products where they fit
`CHANGED_SECONDS`. The rest takes turns: each turn has some combinations of a covering of each product, and `TURNS`
turns have them all. Slow tests outside products take turns too (`some_slow`). `support/sample.py` gives the changed
files and the turn of a commit.
"""

import itertools
import posixpath
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "mesh_transformer/"
# a prime number, so that landings of equally many commits each reach all turns
TURNS = 11
# of the 15 minutes on two cores: CPU time for combinations that test a changed file
CHANGED_SECONDS = 75

Case = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Product:
    """A product of variants.

    Args:
        cases: the combinations.
        seconds: CPU time of a combination that is compiled anew.
        files: files and folders of mesh_transformer/ that every combination tests, or a function that gives them for
            the values of one. `../README.md` is a file beside that folder.
        strength: what a covering contains. 1: each value of each factor. 2: each pair of values of two factors.
    """

    cases: tuple[Case, ...]
    seconds: float
    files: Sequence[str] | Callable[..., Sequence[str]]
    strength: int = 1

    def __post_init__(self) -> None:
        names = {name for case in self.cases for name in self.tested(case)}
        if absent := sorted(name for name in names if not (ROOT / PACKAGE / name).exists()):
            raise ValueError(f"a product tests files that {PACKAGE} does not have: {', '.join(absent)}")

    def tested(self, case: Case) -> Sequence[str]:
        """The files and folders that a combination tests."""
        return self.files(*case) if callable(self.files) else self.files

    def covering(self, seed: str) -> list[Case]:
        """Few combinations that contain each `strength` values of different factors that the product contains."""
        return list(ordered(self.cases, seed, self.strength))


def sampled(*factors: Iterable[Any], seconds: float, files: Any, strength: int = 1) -> list[Any]:
    """The whole product of the factors, for `pytest.mark.parametrize`; `support/sample.py` marks what a run leaves out.

    Args:
        factors: the values of each, or a dictionary, whose keys are taken. Their texts are the ids.
        seconds, files, strength: see `Product`.
    """
    product = Product(tuple(itertools.product(*factors)), seconds, files, strength)
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=pytest.mark.matrix(product, case))
        for case in product.cases
    ]


def ordered(cases: Sequence[Case], seed: str, strength: int | None = None) -> Iterator[Case]:
    """The combinations in an order: first they contain each value, then each pair of values, and so on.

    Greedy: the next one is the first, in an order that the seed shuffles, that adds the most.

    Args:
        strength: stop when each `strength` values of different factors are contained; None: all combinations.
    """
    left = list(cases)
    random.Random(seed).shuffle(left)
    done: list[Case] = []
    for size in range(1, (strength or max(map(len, left), default=0)) + 1):
        parts = {case: set(itertools.combinations(enumerate(case), size)) for case in cases}
        missing = set().union(*parts.values()).difference(*(parts[case] for case in done))
        while missing:
            best = max(left, key=lambda case: len(parts[case] & missing))
            left.remove(best)
            done.append(best)
            missing -= parts[best]
            yield best


class Choice(NamedTuple):
    """What a run tests of its products.

    Args:
        cases: the combinations of each product.
        changed: of the products that test a changed file: combinations chosen for that, and all that test one.
    """

    cases: dict[Product, set[Case]]
    changed: dict[Product, tuple[int, int]]


def choose(tests: Mapping[Product, str], changed: Iterable[str], turn: int) -> Choice:
    """The combinations that a run tests.

    Combinations that test a changed file come first, up to CHANGED_SECONDS: whole products that fit their share of this
    time, then coverings of the other products, then more of these. The turn's share of the coverings follows, then
    shares of later turns in what is left of CHANGED_SECONDS. Any 2 TURNS - 1 turns in a row have a covering of each
    product.

    Args:
        tests: the file of tests of each product, relative to the root.
        changed: files that were changed, relative to the root.
        turn: a number that grows by one with each commit.
    """
    changed, left = tuple(changed), float(CHANGED_SECONDS)
    block, position = divmod(turn, TURNS)
    cases: dict[Product, set[Case]] = {product: set() for product in tests}

    def take(product: Product, case: Case) -> None:
        nonlocal left
        if case not in cases[product] and product.seconds <= left:
            cases[product].add(case)
            left -= product.seconds

    touched = {product: found for product in tests if (found := _touched(product, tests[product], changed))}
    by_cost = sorted(touched, key=lambda one: one.seconds * len(touched[one]))
    # a product runs whole if it fits an equal share of what the cheaper ones leave
    while by_cost and by_cost[0].seconds * len(touched[by_cost[0]]) <= left / len(by_cost):
        whole = by_cost.pop(0)
        for case in touched[whole]:
            take(whole, case)
    coverings = [[(one, case) for case in ordered(touched[one], str(block), 1)] for one in by_cost]
    # one combination of each product after the other, so that all have some where the coverings do not fit
    for turns in itertools.zip_longest(*coverings):
        for product, case in filter(None, turns):
            take(product, case)
    for product in by_cost:
        for case in ordered(touched[product], str(block)):
            take(product, case)
    counts = {product: (len(cases[product]), len(found)) for product, found in touched.items()}
    shares = _shares(tests, str(block))
    for product, case in shares[position]:
        cases[product].add(case)
    for later in range(1, TURNS):
        for product, case in shares[(position + later) % TURNS]:
            take(product, case)
    return Choice(cases, counts)


def _touched(product: Product, test: str, changed: Sequence[str]) -> list[Case]:
    """The combinations that test a changed file; all, if the file of tests was changed."""
    if test in changed:
        return list(product.cases)
    return [
        case
        for case in product.cases
        if any(
            _is_in(name, posixpath.normpath(f"{PACKAGE}{place}")) for name in changed for place in product.tested(case)
        )
    ]


def _is_in(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place.rstrip('/')}/")


def _shares(products: Iterable[Product], seed: str) -> list[list[tuple[Product, Case]]]:
    """The coverings of all products in TURNS parts that take about as long."""
    shares: list[list[tuple[Product, Case]]] = [[] for _ in range(TURNS)]
    seconds = [0.0] * TURNS
    for product in sorted(products, key=lambda one: -one.seconds):
        for case in product.covering(seed):
            least = seconds.index(min(seconds))
            shares[least].append((product, case))
            seconds[least] += product.seconds
    return shares


def some_slow(slow: Mapping[str, int], changed: Iterable[str], turn: int) -> set[str]:
    """The files whose slow tests run in a turn: half of the tests, so that two turns in a row have all, and then
    changed files, up to three quarters.

    Args:
        slow: the number of slow tests of each file.
        changed: the files of these that test a change.
        turn: a number that grows by one with each commit.
    """
    halves: tuple[set[str], set[str]] = (set(), set())
    tests = [0, 0]
    for name in sorted(slow, key=lambda one: (-slow[one], one)):
        less = tests.index(min(tests))
        halves[less].add(name)
        tests[less] += slow[name]
    taken, count = halves[turn % 2], tests[turn % 2]
    for name in sorted(set(changed) - taken):
        if count + slow[name] <= 0.75 * sum(tests):
            taken.add(name)
            count += slow[name]
    return taken
