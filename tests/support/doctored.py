"""Machines for the doctor: packages, programs and a JAX that are not real, and what the doctor says of them."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from mesh_transformer.doctor import accelerators
from mesh_transformer.doctor.checks import checks, report
from mesh_transformer.doctor.findings import Finding

WORKING_JAX = """
class Device:
    platform = device_kind = "cpu"
    memory_stats = lambda self: None
local_devices = lambda: [Device()]
"""


def findings(name: str, wait_s: float = 20) -> list[Finding]:
    """What one check of the table finds now."""
    accelerators.smi.cache_clear()
    table = checks(wait_s, online=True)
    return [finding for _, finding in report({name: table[name]})]


def problems(name: str, level: str = "problem") -> list[Finding]:
    """The findings of one check that have this level."""
    return [finding for finding in findings(name) if finding.level == level]


def write_package(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> None:
    """The metadata of a package, which hide those of an installed package if `folder` comes first in sys.path."""
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir(parents=True)
    lines = [f"Requires-Dist: {text}\n" for text in requires]
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{''.join(lines)}"
    (place / "METADATA").write_text(text)


def write_program(folder: Path, name: str, script: str) -> None:
    """A program of the shell."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def write_jax(folder: Path, code: str = WORKING_JAX) -> None:
    """A JAX for the child process."""
    (folder / "jax").mkdir(parents=True, exist_ok=True)
    (folder / "jax" / "__init__.py").write_text(code)


def prepend(monkeypatch: pytest.MonkeyPatch, variable: str, folder: Path) -> None:
    """Put a folder before the others of a variable such as PATH."""
    others = os.environ.get(variable)
    monkeypatch.setenv(variable, f"{folder}{os.pathsep}{others}" if others else str(folder))
