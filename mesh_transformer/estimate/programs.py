"""Programs compiled for devices that are not attached, and the folder that keeps them.

A kept program is the optimized text and the compiler's count of its memory, so that a later version of the estimate
reads the same program. Its name is a hash of the program before compilation, the target, and the versions of JAX and
of the compiler.
"""

import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from mesh_transformer import cache_folders
from mesh_transformer.estimate.gpus import COMPILE_OPTIONS
from mesh_transformer.estimate.target import Target
from mesh_transformer.train.step import peak_bytes

GIB = 2**30
# Kept programs; the oldest are deleted. A program of 6B takes about 100 KB.
MAX_PROGRAMS = 1000
# The reason for a program that is refused, and not because of its memory.
COMPILER_FAILED = "the compiler failed"
# The suffix of the file that exists while a process compiles a program; its number follows.
BEGUN = ".begun"
# The packages whose version decides which program a source becomes.
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
# "Used 19.26G of 15.48G hbm", "the total memory required for ... (512.00G) exceeds available HBM"
_NEEDED = re.compile(r"(?:Used |\()(\d+(?:\.\d+)?)([MG])(?: of|\) exceeds)")


@dataclass(frozen=True)
class Compiled:
    """A program that the compiler accepted, or the reason why it refused it.

    Args:
        hlo: the optimized text; empty if the program was refused.
        peak_bytes: the memory that one device needs. For a refused program: the number in the message, or None.
        refused: the compiler's message; None if it accepted the program.
    """

    hlo: str
    peak_bytes: int | None
    refused: str | None = None


def compile_for(lowered: jax.stages.Lowered, target: Target, folder: Path | None) -> Compiled:
    """Compile a program, or read it from `folder`, which keeps compiled programs. None: compile, and keep nothing.

    The program must have been lowered for the devices of `target`. A program whose compiler ended the process before,
    as libtpu does where a check of its own fails, is refused.
    """
    path = None if folder is None else folder / f"{_key(lowered, target)}.json.gz"
    if path is not None and path.exists():
        with contextlib.suppress(OSError, ValueError, TypeError), gzip.open(path, "rt") as file:
            kept = Compiled(**json.load(file))
            path.touch()
            return kept
    options = {} if target.accelerator.is_tpu else COMPILE_OPTIONS
    if path is None:
        return _compile(lowered, options)
    begun = path.with_suffix(f"{BEGUN}-{os.getpid()}")
    for earlier in path.parent.glob(f"{path.stem}{BEGUN}-*"):
        if not _runs(int(earlier.suffix.rpartition("-")[2])):
            return Compiled("", None, f"{COMPILER_FAILED}: it ended the process (delete {earlier} to try again)")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        begun.touch()
    try:
        compiled = _compile(lowered, options)
    finally:
        begun.unlink(missing_ok=True)
    _keep(path, compiled)
    return compiled


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def compiler_versions() -> dict[str, str]:
    """The versions of the installed packages that decide which program a source becomes, by name."""
    versions = {}
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def default_folder() -> Path:
    """mesh-transformer/preflight in the user's cache folder."""
    return Path(cache_folders.own("preflight"))


def _compile(lowered: jax.stages.Lowered, options: dict[str, str | bool]) -> Compiled:
    try:
        with without_cache():
            compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        message = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in message:
            return Compiled("", None, f"{COMPILER_FAILED}: {message}")
        needed = _NEEDED.search(str(error))
        unit = 2**20 if needed and needed[2] == "M" else GIB
        return Compiled("", int(float(needed[1]) * unit) if needed else None, message)
    return Compiled(compiled.as_text() or "", peak_bytes(compiled))


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """JAX writes programs for absent devices to its cache, but cannot read them back."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    # JAX looks at the setting only once, if it is not told to look again
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _key(lowered: jax.stages.Lowered, target: Target) -> str:
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    identity = json.dumps([target.name, compiler_versions(), flags])
    return hashlib.sha256(f"{identity}\n{lowered.as_text()}".encode()).hexdigest()


def _keep(path: Path, compiled: Compiled) -> None:
    """Write a program, and delete the oldest. Without a writable folder nothing is kept."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        with gzip.open(partial, "wt") as file:
            json.dump(asdict(compiled), file)
        partial.replace(path)
        programs = sorted(path.parent.glob("*.json.gz"), key=lambda kept: kept.stat().st_mtime)
        for old in programs[:-MAX_PROGRAMS]:
            old.unlink(missing_ok=True)
