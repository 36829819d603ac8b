"""The Python packages: against requirements.txt, against each other, and the plugins of JAX.

The versions that fit a JAX are in its own metadata: the extras name the versions of libtpu and of the CUDA plugins.
"""

from __future__ import annotations

import collections
import importlib
import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from mesh_transformer import environment
from mesh_transformer.doctor.findings import Finding, ok, problem, warning
from mesh_transformer.errors import listed

# shown if nothing is wrong
_SHOWN = ("jax", "jaxlib", "dm-haiku", "optax", "orbax-checkpoint", "grain", "numpy", "transformers", "ray")
_PLUGIN = re.compile(r"libtpu(-nightly)?|jax-(cuda|rocm)\d+-(plugin|pjrt)|jax-metal|intel-extension-for-openxla")
_NAME = re.compile(r"[\w.-]+")


def installed(name: str) -> str | None:
    """The version of a package; None: it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def plugins() -> dict[str, str]:
    """The versions of the packages that add a kind of device to JAX, by name."""
    versions = {}
    for package in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"] or "").lower()
        # of two copies, Python imports the first
        if _PLUGIN.fullmatch(name) and name not in versions:
            versions[name] = package.version
    return versions


def install(extra: str) -> str:
    """The command that installs this program with an extra."""
    checkout = environment.SHIPPED == environment.CHECKOUT
    return f"pip install -e '.[{extra}]'" if checkout else f"pip install 'mesh-transformer[{extra}]'"


def requirements() -> Iterator[Finding]:
    """The packages of requirements.txt: whether they are installed, and neither too old nor too new."""
    lines = _lines()
    versions = {name[0]: installed(name[0]) for name in map(_NAME.match, lines) if name}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        yield problem(f"not installed: {listed(missing, most=8)}", environment.way_in())
    if (reader := _reader()) is None:
        if any(versions.values()):
            yield warning("versions are not compared: the package packaging is not installed", "pip install packaging")
        return
    wrong = False
    for needed in map(reader.Requirement, lines):
        version = versions[needed.name]
        if version is not None and not needed.specifier.contains(version, prereleases=True):
            wrong = True
            yield problem(
                f"{needed.name} {version} is installed, but {needed.specifier} is needed",
                f"pip install '{needed.name}{needed.specifier}'",
            )
    if not wrong and not missing:
        shown = ", ".join(f"{name} {versions[name]}" for name in _SHOWN if name in versions)
        yield ok(f"all {len(lines)} of requirements.txt, among them {shown}")


def dependencies() -> Iterator[Finding]:
    """Whether the packages of requirements.txt and JAX's plugins meet each other's requirements, as `pip check`."""
    if (reader := _reader()) is None:
        return
    count, unmet = 0, collections.defaultdict[str, dict[str, str]](dict)
    for owner, needed in _needs(reader, [*_lines(), *plugins()]):
        version, count = installed(needed.name), count + 1
        if version is None or not needed.specifier.contains(version, prereleases=True):
            unmet[needed.name][owner] = str(needed.specifier)
    for name, by_owner in unmet.items():
        version = installed(name)
        fault = f"{name} {version} does not satisfy" if version else f"{name} is not installed, but needed by"
        owners = [f"{owner} ({name}{specifier})" for owner, specifier in sorted(by_owner.items())]
        # JAX refuses another jaxlib in its import; other packages may state more than they need
        level = problem if version is None or "jax" in by_owner else warning
        specifiers = ",".join(sorted(set(filter(None, by_owner.values()))))
        yield level(f"{fault} {listed(owners)}", f"pip install '{name}{specifiers}'")
    if not unmet and count:
        yield ok(f"the packages meet all {count:,} requirements for each other")


def _needs(reader: Any, lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The requirements of packages and, recursively, of their dependencies: (name of the package, its requirement)."""
    left, seen = [reader.Requirement(line) for line in lines], set()
    while left:
        package = left.pop()
        for extra in ("", *package.extras):
            if (package.name, extra) in seen or installed(package.name) is None:
                continue
            seen.add((package.name, extra))
            for text in importlib.metadata.requires(package.name) or ():
                needed = reader.Requirement(text)
                # without a marker it was yielded for the empty extra
                if needed.marker.evaluate({"extra": extra}) if needed.marker else not extra:
                    yield package.name, needed
                    left.append(needed)


def jax_plugins() -> Iterator[Finding]:
    """libtpu and the plugins for GPUs: whether they are made for the installed JAX, and do not stand in each other's
    way."""
    if not (versions := plugins()):
        yield ok("none: JAX computes on the CPU", f"for TPUs {install('tpu')}, for NVIDIA GPUs {install('cuda')}")
        return
    yield ok(", ".join(f"{name} {version}" for name, version in sorted(versions.items())))
    yield from _made_for_another_jax(versions)
    kinds = sorted({re.sub(r"-(plugin|pjrt|nightly)$", "", name) for name in versions})
    several = [kind for kind in kinds if kind.startswith("jax-cuda")]
    if len(several) > 1:
        # both register as the platform cuda (jax_plugins/xla_cuda12 and xla_cuda13)
        packages = " ".join(name for name in sorted(versions) if name.startswith(several[0]))
        yield problem(f"{' and '.join(several)} are both installed: JAX can use one", f"pip uninstall {packages}")
    elif len(kinds) > 1:
        yield warning(
            f"plugins of several kinds of devices: {', '.join(kinds)}; JAX asks all of them at each start",
            "use one environment for each kind of device",
        )
    if {"libtpu", "libtpu-nightly"} <= versions.keys():
        mend = f"pip uninstall libtpu libtpu-nightly, then {install('tpu')}"
        yield problem("libtpu and libtpu-nightly are installed: they overwrite each other's files", mend)


def _made_for_another_jax(versions: dict[str, str]) -> Iterator[Finding]:
    """The plugins and the jaxlib whose versions differ from the versions in the extras of the installed JAX."""
    jax, jaxlib, reader = installed("jax"), installed("jaxlib"), _reader()
    if jax is None or reader is None:
        return
    extras = collections.defaultdict(list)
    for text in importlib.metadata.requires("jax") or ():
        extra = re.search(r"extra == ['\"](.+?)['\"]", text)
        # the extras cuda, cuda12 and cuda12-local name the same versions
        if extra and not extra[1].endswith("-local") and extra[1] != "cuda":
            extras[extra[1]].append(reader.Requirement(text))
    for name, needs in extras.items():
        if not any(needed.name in versions for needed in needs):
            continue
        for needed in needs:
            version = jaxlib if needed.name == "jaxlib" else versions.get(needed.name)
            if version is not None and not needed.specifier.contains(version, prereleases=True):
                mend = f"pip install -U 'jax[{name}]=={jax}'"
                what = f"{needed.name} {version} is not for jax {jax} with these plugins, which needs"
                yield problem(f"{what} {needed.specifier}", mend)


def _lines() -> list[str]:
    """The lines of requirements.txt."""
    with open(os.path.join(environment.SHIPPED, "requirements.txt"), encoding="utf-8") as file:
        return [line.strip() for line in file if line.strip() and not line.startswith("#")]


def _reader() -> Any:
    """The module that reads requirements: of the package packaging, or pip's copy of it; None: there is none."""
    for name in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None
