"""The compile cache of runs is on by default and complete."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.commands import run, write_run


class Cached(NamedTuple):
    """The folder of a run after its first start with default settings, and the output of this start."""

    run: Path
    compiled: int
    read: int
    cache: str


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cached]:
    folder = tmp_path_factory.mktemp("first")
    write_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"):
            patch.delenv(name, raising=False)  # use the defaults
        yield Cached(folder, *_counts(folder, "first"))


def _counts(folder: Path, model_dir: str, **environment: str) -> tuple[int, int, str]:
    arguments = (
        "--config",
        "config.json",
        "--set",
        f"checkpoint.model_dir={model_dir}",
        "--set",
        "optimizer.total_steps=3",
    )
    _, errors = run("device_train.py", *arguments, cwd=folder, **environment)
    match = re.search(r"(\d+) programs? compiled, (\d+) read from (\S+)", errors)
    assert match, errors[-2000:]
    return int(match[1]), int(match[2]), match[3]


def test_the_second_start_of_an_unchanged_run_compiles_nothing(first):
    assert first.compiled > 3
    assert first.read == 0
    assert first.cache == str(first.run / "cache/mesh-transformer/compiled")
    assert _counts(first.run, "second") == (0, first.compiled, first.cache)


def test_the_users_own_folder_is_taken(first, tmp_path):
    own = tmp_path / "own"
    _, _, folder = _counts(first.run, "own", JAX_COMPILATION_CACHE_DIR=str(own))
    assert folder == str(own)
    assert any(own.iterdir())


def test_the_user_may_switch_it_off(first):
    arguments = ("checkpoint.model_dir=off", "optimizer.total_steps=1", "data.val_set={}")
    options = [part for value in arguments for part in ("--set", value)]
    _, errors = run(
        "device_train.py", "--config", "config.json", *options, cwd=first.run,
        JAX_ENABLE_COMPILATION_CACHE="false",
    )  # fmt: skip
    assert "the compile cache is off" in errors
