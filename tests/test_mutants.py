"""The table of scripts/mutants.py fits today's sources, and a run of tests ends in time."""

import sys
from pathlib import Path

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
    assert not name or f"def {name}(" in text


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the CPU time is read from /proc")
def test_the_limit_counts_the_children(tmp_path: Path) -> None:
    busy = "import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', 'while 1: pass'])"
    assert mutants.run_limited([sys.executable, "-c", busy], tmp_path, 0.3) == (None, "begun\n")
    assert mutants.run_limited([sys.executable, "-c", "raise SystemExit(5)"], tmp_path, 60) == (5, "")
