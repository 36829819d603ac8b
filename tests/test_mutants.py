"""The table of scripts/mutants.py fits today's sources."""

import pytest

from scripts import mutants
from scripts.mutants import Mutant


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.file)
def test_a_mutant_changes_one_place_and_compiles(mutant: Mutant) -> None:
    text = (mutants.ROOT / mutants.PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.old != mutant.new
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


@pytest.mark.parametrize("test", sorted({test for mutant in mutants.MUTANTS for test in mutant.tests}))
def test_a_named_test_exists(test: str) -> None:
    file, _, name = test.partition("::")
    text = (mutants.ROOT / file).read_text()
    assert not name or f"def {name.partition('[')[0]}(" in text
