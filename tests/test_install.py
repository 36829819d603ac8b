"""scripts/install.py: uv gets the settings that pip has."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

CONFIG = """
[global]
index-url = https://index.example/simple
constraint = a.txt
    b.txt
timeout = 7
[install]
extra-index-url = https://more.example/simple https://third.example/simple
[list]
format = freeze
"""


@pytest.fixture
def install(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The script, with these settings of pip only."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(CONFIG)
    # pip reads no file after this one
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
    return SimpleNamespace(**runpy.run_path(str(repo / "scripts/install.py")))


def test_uv_gets_the_settings_of_pip(install: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable wins over a file, and the section of the command over the one for all."""
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "9")
    options, variables = install.for_uv(install.settings())
    # a file for all users of the machine may add others
    assert set(zip(options[::2], options[1::2], strict=True)) >= {
        ("--constraint", "a.txt"),
        ("--constraint", "b.txt"),
        ("--default-index", "https://index.example/simple"),
        ("--find-links", "/wheels"),
        ("--index", "https://more.example/simple"),
        ("--index", "https://third.example/simple"),
        ("--index-strategy", "unsafe-best-match"),
    }
    assert variables["UV_HTTP_TIMEOUT"] == "9"


def test_pip_installs_with_a_setting_that_uv_does_not_have(
    install: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_USE_DEPRECATED", "legacy-resolver")
    assert install.for_uv(install.settings()) is None


@pytest.mark.nightly
def test_without_a_network_the_error_ends_in_what_to_set(repo: Path, tmp_path: Path) -> None:
    """An index that refuses connections. The environment is one of the script's own."""
    environment = {
        **os.environ,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "UV_HTTP_RETRIES": "0",
    }
    environment |= {"PIP_CONFIG_FILE": os.devnull, "UV_OFFLINE": "1", "PYTHON": sys.executable}
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_CACHE_DIR"):
        environment.pop(name, None)
    ended = subprocess.run(
        ["bash", repo / "scripts/venv.sh", tmp_path / "venv"], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1, ended.stderr
    last = " ".join(ended.stderr.splitlines()[-3:])
    assert "Without a network, set PIP_FIND_LINKS to a folder of wheels, or PIP_INDEX_URL to an index" in last
    assert not (tmp_path / "venv/.installed").exists()
