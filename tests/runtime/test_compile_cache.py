"""The compile cache of real runs: on by default, and complete."""

from __future__ import annotations

import re
from pathlib import Path

from commands import run, write_run


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
    match = re.search(r"(\d+) programs compiled, (\d+) read from (\S+)", errors)
    assert match, errors[-2000:]
    return int(match[1]), int(match[2]), match[3]


def test_the_second_start_of_an_unchanged_run_compiles_nothing(tmp_path, monkeypatch):
    for name in (
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_COMPILATION_CACHE_MAX_SIZE",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    ):
        monkeypatch.delenv(name, raising=False)  # what a user has: the defaults
    write_run(tmp_path)
    compiled, read, folder = _counts(tmp_path, "first")
    assert compiled > 3
    assert read == 0
    assert folder == str(tmp_path / "cache/mesh-transformer/compiled")
    assert _counts(tmp_path, "second") == (0, compiled, folder)


def test_the_users_own_settings_win(tmp_path):
    write_run(tmp_path)
    own = tmp_path / "own"
    _, _, folder = _counts(tmp_path, "run", JAX_COMPILATION_CACHE_DIR=str(own))
    assert folder == str(own)
    assert any(own.iterdir())
    arguments = (
        "--config",
        "config.json",
        "--set",
        "checkpoint.model_dir=off",
        "--set",
        "optimizer.total_steps=1",
    )
    _, errors = run("device_train.py", *arguments, cwd=tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")
    assert "the compile cache is off" in errors
