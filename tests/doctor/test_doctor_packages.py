"""Faults of the packages, made with the metadata of packages that are not there."""

from importlib import metadata
from pathlib import Path

import pytest
from support.doctored import findings, problems, write_package

from mesh_transformer import environment
from mesh_transformer.doctor import packages

JAX, JAXLIB = metadata.version("jax"), metadata.version("jaxlib")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that comes first."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_environment_in_order_has_no_problem():
    (line,) = findings("packages")
    assert line.level == "ok"
    assert f"jax {JAX}, jaxlib {JAXLIB}" in line.found
    assert not problems("dependencies")


@pytest.mark.parametrize(("name", "version"), [("numpy", "1.26.4"), ("transformers", "4.57.1"), ("ray", "3.0.0")])
def test_a_package_too_old_or_too_new(site: Path, name: str, version: str) -> None:
    write_package(site, name, version)
    (fault,) = problems("packages")
    assert fault.found.startswith(f"{name} {version} is installed, but ")
    assert fault.mend.startswith(f"pip install '{name}")


def test_a_package_that_is_missing(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "requirements.txt").write_text("# comment\njax>=0.10,<0.13\nno-such-package[gcs]>=1\n")
    monkeypatch.setattr(environment, "SHIPPED", str(site))
    (fault,) = problems("packages")
    assert fault.found == "not installed: no-such-package"
    assert fault.mend == environment.way_in()
    assert "ok" not in {line.level for line in findings("packages")}


def test_a_jaxlib_that_jax_refuses(site: Path) -> None:
    write_package(site, "jaxlib", "0.10.0")
    (fault,) = problems("dependencies")
    assert fault.found.startswith("jaxlib 0.10.0 does not satisfy jax (jaxlib<=")


def test_a_package_that_many_need_is_one_line(site: Path) -> None:
    write_package(site, "numpy", "1.26.4")
    (fault,) = problems("dependencies")
    assert "jax (numpy>=2.0), " in fault.found
    assert not problems("dependencies", "warning")


def test_a_package_that_needs_an_absent_one(site: Path) -> None:
    write_package(site, "einops", "0.8.1", ["no-such-package>=2", 'not-this-one; extra == "all"'])
    (fault,) = problems("dependencies")
    assert fault.found == "no-such-package is not installed, but needed by einops (no-such-package>=2)"
    assert fault.mend == "pip install 'no-such-package>=2'"


def test_a_package_that_states_too_much_is_a_warning(site: Path) -> None:
    write_package(site, "einops", "0.8.1", ["numpy<2"])
    assert not problems("dependencies")
    (fault,) = problems("dependencies", "warning")
    assert fault.found == f"numpy {metadata.version('numpy')} does not satisfy einops (numpy<2)"


def jax_of(site: Path) -> None:
    """A JAX with the extras of 0.10.2."""
    write_package(
        site,
        "jax",
        "0.10.2",
        [
            "jaxlib<=0.10.2,>=0.10.1",
            'jaxlib<=0.10.2,>=0.10.2; extra == "tpu"',
            'libtpu==0.0.42.*; extra == "tpu"',
            'jaxlib==0.10.1; extra == "ci"',
            'jax-cuda12-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda12"',
            'jax-cuda13-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda"',
            'jax-cuda13-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda13"',
            'jax-cuda13-plugin<=0.10.2,>=0.10.2; extra == "cuda13-local"',
        ],
    )


@pytest.mark.parametrize(
    ("name", "version", "mend"),
    [
        ("libtpu", "0.0.42.1", None),
        ("libtpu", "0.0.30", "pip install -U 'jax[tpu]==0.10.2'"),
        ("jax-cuda13-plugin", "0.10.2", None),
        ("jax-cuda13-plugin", "0.9.2", "pip install -U 'jax[cuda13]==0.10.2'"),
        ("jax_cuda12_plugin", "0.11.0", "pip install -U 'jax[cuda12]==0.10.2'"),
    ],
)
def test_a_plugin_for_another_jax(site: Path, name: str, version: str, mend: str | None) -> None:
    jax_of(site)
    write_package(site, "jaxlib", "0.10.2")
    write_package(site, name, version)
    assert [fault.mend for fault in problems("jax plugins")] == ([mend] if mend else [])


@pytest.mark.usefixtures("no_libtpu")
def test_a_jaxlib_that_does_for_a_cpu_only(site: Path) -> None:
    jax_of(site)
    write_package(site, "jaxlib", "0.10.1")
    assert not problems("jax plugins")
    write_package(site, "libtpu", "0.0.42.1")
    (fault,) = problems("jax plugins")
    assert fault.found.startswith("jaxlib 0.10.1 is not for jax 0.10.2 with these plugins")
    assert fault.mend == "pip install -U 'jax[tpu]==0.10.2'"
    assert not problems("dependencies")


def test_halves_of_a_plugin_that_differ(site: Path) -> None:
    write_package(site, "jax-cuda13-plugin", JAX, [f"jax-cuda13-pjrt=={JAX}"])
    write_package(site, "jax-cuda13-pjrt", "0.9.2")
    (fault,) = problems("dependencies", "warning")
    assert fault.found == f"jax-cuda13-pjrt 0.9.2 does not satisfy jax-cuda13-plugin (jax-cuda13-pjrt=={JAX})"


def test_plugins_that_stand_in_each_others_way(site: Path) -> None:
    for major in (12, 13):
        write_package(site, f"jax-cuda{major}-plugin", JAX)
        write_package(site, f"jax-cuda{major}-pjrt", JAX)
    (fault,) = problems("jax plugins")
    assert fault.mend == "pip uninstall jax-cuda12-pjrt jax-cuda12-plugin"
    write_package(site, "libtpu-nightly", "0.1.dev1")
    write_package(site, "libtpu", "0.0.42.1")
    assert [fault.found for fault in problems("jax plugins")][1:] == [
        "libtpu and libtpu-nightly are installed: they overwrite each other's files"
    ]


def test_plugins_of_two_kinds_are_a_warning(site: Path) -> None:
    jax_of(site)
    write_package(site, "jaxlib", "0.10.2")
    write_package(site, "jax-cuda13-plugin", "0.10.2")
    write_package(site, "libtpu", "0.0.42.1")
    assert not problems("jax plugins")
    (fault,) = problems("jax plugins", "warning")
    assert "jax-cuda13, libtpu" in fault.found


def test_without_the_package_packaging_only_absence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_reader", lambda: None)
    (line,) = findings("packages")
    assert (line.level, line.mend) == ("warning", "pip install packaging")
    assert not findings("dependencies")
