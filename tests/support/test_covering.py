"""The part of each product that the default run tests."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import covering, sample
from support.covering import CHANGED_SECONDS, ROOT, TURNS, Product, choose, ordered, sampled, some_slow

FACTORS = ["abcde", [1, 2, 3], [True, False]]
CASES = tuple(itertools.product(*FACTORS))
RING, PIPELINE = "ops/attend/ring.py", "train/pipeline.py"


def parts(combinations, strength):
    return {part for case in combinations for part in itertools.combinations(enumerate(case), strength)}


@pytest.mark.parametrize(("strength", "at_least", "at_most"), [(1, 5, 5), (2, 15, 20), (3, 30, 30)])
@pytest.mark.parametrize("seed", ["0", "c0ffee"])
def test_every_value_or_pair_is_in_a_covering(strength, at_least, at_most, seed):
    chosen = list(ordered(CASES, seed, strength))
    assert parts(chosen, strength) == parts(CASES, strength)
    assert at_least <= len(chosen) <= at_most
    assert len(set(chosen)) == len(chosen)


def test_the_order_begins_with_coverings_and_has_all():
    found = list(ordered(CASES, "0"))
    assert sorted(found) == sorted(CASES)
    assert parts(found[:5], 1) == parts(CASES, 1)
    assert parts(found[:20], 2) == parts(CASES, 2)


def test_a_product_with_holes_is_covered_as_far_as_it_goes():
    some = [case for case in CASES if case[0] != "a" or case[1] == 1]
    assert parts(ordered(some, "0", 2), 2) == parts(some, 2)


def product(seconds=1.0, files=(RING,), strength=1, cases=CASES):
    return Product(cases, seconds, files, strength)


@pytest.mark.parametrize("first", [0, 5, 584])
def test_any_commits_in_a_row_have_a_covering_of_each_product(first):
    """No change takes time from the turns, and each run has its share."""
    products = {product(CHANGED_SECONDS / 3): "tests/a.py", product(50, (PIPELINE,), 2): "tests/b.py"}
    found = {one: set() for one in products}
    for turn in range(first, first + 2 * TURNS - 1):
        chosen = choose(products, ["mesh_transformer/ops/attend/ring.py"], turn).cases
        for one in products:
            found[one] |= chosen[one]
    for one in products:
        assert parts(found[one], one.strength) == parts(CASES, one.strength)


def test_turns_take_about_as_long_and_change_from_block_to_block():
    products = {product(7, (RING,)): "a", product(20, (PIPELINE,), 2): "b"}
    for block in range(3):
        seconds = [sum(one.seconds for one, _ in share) for share in covering._shares(products, str(block))]
        assert max(seconds) - min(seconds) <= 20
    blocks = [choose(products, (), turn).cases for turn in range(40 * TURNS)]
    assert set().union(*(chosen[one] for chosen in blocks for one in products)) == set(CASES)


def test_a_product_over_a_changed_file_runs_whole():
    ring, pipeline = product(CHANGED_SECONDS / len(CASES)), product(1, (PIPELINE,))
    tests = {ring: "tests/ops/test_ring.py", pipeline: "tests/parallel/test_pipeline.py"}
    for changed in ("mesh_transformer/ops/attend/ring.py", "tests/ops/test_ring.py"):
        choice = choose(tests, ["README.md", changed], 3)
        assert choice.cases[ring] == set(CASES)
        assert choice.changed == {ring: (len(CASES), len(CASES))}
        # the rest keeps its turn
        assert choice.cases[pipeline] == {case for one, case in covering._shares(tests, "0")[3] if one is pipeline}


def test_a_folder_has_its_files_and_no_others():
    attend = product(files=("ops/attend",))
    assert choose({attend: "a"}, ["mesh_transformer/ops/attend/ring.py"], 0).changed
    assert not choose({attend: "a"}, ["mesh_transformer/ops/attend_more.py", "ops/attend/ring.py"], 0).changed


def test_only_the_combinations_that_test_the_changed_file_run():
    families = {"a": "families/gemma.py", "b": "families/llama.py"}
    some = product(files=lambda letter, *_: [families.get(letter, RING)])
    choice = choose({some: "tests/a.py"}, ["mesh_transformer/families/llama.py"], 0)
    assert {case for case in CASES if case[0] == "b"} <= choice.cases[some]
    assert choice.changed[some] == (6, 6)


def test_what_does_not_fit_is_covered_first_and_cheap_products_run_whole():
    dear, cheap = product(CHANGED_SECONDS / 10), product(CHANGED_SECONDS / 60)
    choice = choose({dear: "a", cheap: "b"}, [f"mesh_transformer/{RING}"], 0)
    assert choice.changed == {dear: (5, 30), cheap: (30, 30)}
    assert parts(choice.cases[dear], 1) == parts(CASES, 1)


def test_a_cheap_product_runs_whole_beside_dear_ones():
    dear = [product(CHANGED_SECONDS / 8) for _ in range(2)]
    cheap = product(CHANGED_SECONDS / 4 / len(CASES))
    choice = choose({dear[0]: "a", cheap: "b", dear[1]: "c"}, [f"mesh_transformer/{RING}"], 0)
    assert choice.changed == {dear[0]: (3, 30), cheap: (30, 30), dear[1]: (3, 30)}


def test_coverings_that_do_not_fit_share_the_time():
    first, second = product(CHANGED_SECONDS / 8), product(CHANGED_SECONDS / 8)
    choice = choose({first: "a", second: "b"}, [f"mesh_transformer/{RING}"], 0)
    assert choice.changed == {first: (4, 30), second: (4, 30)}


def test_without_a_change_later_turns_take_its_time():
    some = product(CHANGED_SECONDS / 4, strength=2)
    (whole, *_), alone = covering._shares([some], "0"), choose({some: "a"}, (), 0).cases[some]
    assert len(alone) == len(whole) + 4


def test_sampled_marks_each_combination_with_its_product():
    params = sampled(*FACTORS, seconds=1, files=(RING,))
    assert [param.values for param in params] == list(CASES)
    assert [param.id for param in params[:2]] == ["a-1-True", "a-1-False"]
    assert [mark.args[1] for param in params for mark in param.marks] == list(CASES)


def test_a_product_of_files_that_do_not_exist_is_refused():
    with pytest.raises(ValueError, match="families/gptk.py, ops/attend/rang.py"):
        product(files=("families/gptk.py", RING, "ops/attend/rang.py"))


def commit(folder: Path, name: str, when: int) -> None:
    (folder / name).write_text(str(when))
    date = {"GIT_COMMITTER_DATE": f"{when} +0000", "GIT_AUTHOR_DATE": f"{when} +0000"}
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["add", "."], [*author, "commit", "-qm", name]):
        subprocess.run(["git", *arguments], cwd=folder, env={**os.environ, **date}, check=True)


def test_the_changed_files_are_those_of_the_last_landing_and_of_uncommitted_work(tmp_path: Path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    hour = 3600
    for number, (name, when) in enumerate({"old": 0, "first": 10 * hour, "last": 12 * hour}.items(), 1):
        commit(tmp_path, name, 1_800_000_000 + when)
        assert sample.commits(tmp_path) == number
    assert sorted(sample.changed_files(tmp_path)) == ["first", "last"]
    (tmp_path / "old").write_text("edited")
    (tmp_path / "new").touch()
    assert sorted(sample.changed_files(tmp_path)) == ["first", "last", "new", "old"]


def test_a_history_of_one_commit_has_uncommitted_changes_only(tmp_path: Path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit(tmp_path, "all", 1_800_000_000)
    (tmp_path / "all").write_text("edited")
    assert sample.changed_files(tmp_path) == ["all"]


def test_without_git_nothing_is_changed_and_the_turn_is_the_first(tmp_path: Path):
    assert (sample.changed_files(tmp_path), sample.commits(tmp_path)) == ([], 0)


def test_the_files_that_a_file_of_tests_imports(repo: Path):
    """Itself, through tests/support, and a module named in `from package import module`."""
    found = sample.imported(repo / "tests/ops/test_context.py", repo)
    some = {
        "tests/ops/test_context.py",
        "tests/support/covering.py",
        "mesh_transformer/ops/attend/context.py",
        "mesh_transformer/parallel/mesh.py",
    }
    assert some <= found
    assert "mesh_transformer/ops/attend/ring.py" not in found
    assert "mesh_transformer/families/gptj.py" in sample.imported(repo / "tests/models/test_model.py", repo)


TEST = """
import pytest
from support.covering import CHANGED_SECONDS, sampled

@pytest.mark.parametrize(
    ("number", "letter"), sampled(range(40), "ab", seconds=CHANGED_SECONDS / 3, files=("ops/attend/ring.py",))
)
def test_some(number, letter):
    pass
"""


@pytest.fixture
def some_tests(tmp_path: Path) -> list[str]:
    """A command that tests a folder with a product and another file."""
    (tmp_path / "test_some.py").write_text(TEST)
    (tmp_path / "test_other.py").write_text("import other\n\ndef test_one():\n    pass\n")
    (tmp_path / "other.py").touch()
    markers = "markers =\n    matrix: a\n    unsampled: b\n    slow: c\n    pod: d\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = . {ROOT} {ROOT / 'tests'}\n{markers}")
    # no other plugins, which take seconds to import
    options = "-m pytest --disable-plugin-autoload -p no:cacheprovider -p xdist -p support.sample -m"
    return [sys.executable, *options.split(), "not unsampled"]


@pytest.mark.parametrize("workers", [[], ["-n1"]])
def test_a_run_says_what_it_chose(tmp_path: Path, some_tests: list[str], workers: list[str]) -> None:
    """The process that prints does not collect if pytest-xdist has workers."""
    run = subprocess.run([*some_tests, *workers], cwd=tmp_path, capture_output=True, text=True)
    # a turn has 3 or 4 of the 40 combinations that cover the product, and 3 more fit CHANGED_SECONDS
    assert re.search(r"^products of variants: [67] of 80 combinations", run.stdout, re.MULTILINE), run.stdout
    assert f"any {2 * TURNS - 1} commits in a row cover each product" in run.stdout
    assert re.search("[78] passed", run.stdout)


def test_a_run_of_changed_files_has_the_tests_that_import_them(tmp_path: Path, some_tests: list[str]) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit(tmp_path, "all", 1_800_000_000)
    (tmp_path / "other.py").write_text("number = 1\n")
    run = subprocess.run([*some_tests, "--changed", "HEAD"], cwd=tmp_path, capture_output=True, text=True)
    assert "1 passed, 80 deselected" in run.stdout


def test_a_file_beside_the_package_selects_its_product():
    page = Product((("README.md",),), 5, ("../README.md",))
    tests = {page: "tests/a.py", product(): "tests/b.py"}
    assert choose(tests, ["README.md"], 3).changed == {page: (1, 1)}
    assert not choose(tests, ["mesh_transformer/README.md"], 3).changed


SLOW = {"tests/a.py": 5, "tests/b.py": 4, "tests/c.py": 3, "tests/d.py": 2, "tests/e.py": 1}


@pytest.mark.parametrize("turn", [0, 7])
@pytest.mark.parametrize("changed", [(), ("tests/c.py",), tuple(SLOW)])
def test_two_turns_have_all_slow_tests_and_a_change_adds_some(turn: int, changed: tuple[str, ...]) -> None:
    first, second = (some_slow(SLOW, changed, number) for number in (turn, turn + 1))
    assert first | second == set(SLOW)
    for taken in (first, second):
        assert set(changed) <= taken or len(changed) == len(SLOW)
        assert 7 <= sum(SLOW[name] for name in taken) <= 11


def test_slow_tests_wait_for_the_next_commit_and_pods_have_turns_of_their_own(
    tmp_path: Path, some_tests: list[str]
) -> None:
    for name, marks in {"test_a": "slow", "test_b": "slow", "test_c": "slow,pod", "test_d": "slow,pod"}.items():
        lines = [f"pytestmark = [{', '.join(f'pytest.mark.{mark}' for mark in marks.split(','))}]"]
        (tmp_path / f"{name}.py").write_text("\n".join(["import pytest", *lines, "def test_it(): pass\n"]))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    ran = []
    for day in (1, 2):
        commit(tmp_path, "all", 1_800_000_000 + 86_400 * day)
        run = subprocess.run([*some_tests, "-v"], cwd=tmp_path, capture_output=True, text=True)
        ran.append(set(re.findall(r"^(test_[abcd])\.py::test_it PASSED", run.stdout, re.MULTILINE)))
        assert "slow tests of commands: 1 of 2 wait for the next commit" in run.stdout
        assert "slow tests of pods and of faults: 1 of 2 wait for the next commit" in run.stdout
        (tmp_path / "other.py").write_text("number = 2\n")
    assert [len(names) for names in ran] == [2, 2]
    assert ran[0] | ran[1] == {"test_a", "test_b", "test_c", "test_d"}
