"""The check of train.py --tpu before it creates a slice."""

import argparse
import importlib.util
import json
import logging
import sys

import pytest
from support.builders import TINY

from mesh_transformer.cluster.driver import commands, fit
from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError


class Reached(Exception):
    """The driver goes on."""


def arguments(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    given = {
        "config_path": str(tmp_path / "config.json"),
        "overrides": ["mesh.tp=8"],
        "tune_model_path": None,
        "fresh_opt": False,
        "adapter": None,
        "new": False,
        "yes": False,
        "version": 1,
        "no_preflight": False,
        **{"tpu": "pod", "tpu_region": "europe-west4-a", "tpu_type": "v3-8", "ray_address": None, "processes": None},
        **{"environment": None, "wheelhouse": None, "user": None, "ssh_key": None, "preemptible": False, "price": None},
        "env": [],
        "slices": 1,
        "verbose": False,
    }
    return argparse.Namespace(**{**given, **changes})


@pytest.fixture(autouse=True)
def _no_cloud(monkeypatch):
    def run(*_):
        raise Reached

    monkeypatch.setattr(commands.ComputeTarget, "run", run)


@pytest.fixture
def checked(monkeypatch):
    """The types of the slices that were checked."""
    found = []
    monkeypatch.setattr(commands, "check_fit", lambda _, kind: found.append(kind))
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["v3-8"]),
        ({"tpu_type": "v5e-8"}, ["v5litepod-8"]),
        ({"tpu_type": "v4-16", "slices": 2}, ["2xv4-16"]),
        ({"no_preflight": True}, []),
        ({"tpu": None, "tpu_region": None, "processes": 2}, []),
    ],
)
def test_only_a_slice_is_checked(tmp_path, checked, changes, expected):
    with pytest.raises(Reached):
        commands.train(arguments(tmp_path, **changes))
    assert checked == expected


@pytest.mark.usefixtures("no_libtpu")
def test_without_libtpu_a_line_says_so(caplog):
    with caplog.at_level(logging.INFO):
        fit.check_fit(parse_config(TINY), "v3-8")
    assert "whether the run fits v3-8 is not checked: pip install 'jax[tpu]'" in caplog.text


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit('error: no such option')", r"preflight failed: error: no such option"),
        (
            "import sys; print('{\"reason\": \"refused\"}'); sys.stderr.write('12:00 W v3-8: nothing fits; x'); "
            "sys.exit(1)",
            r"the run does not fit v3-8: nothing fits; x \(--no-preflight runs it anyway\)",
        ),
    ],
)
def test_refusals(tmp_path, monkeypatch, script, message):
    program = tmp_path / "preflight.py"
    program.write_text(script)
    monkeypatch.setattr(fit, "PREFLIGHT", (sys.executable, str(program)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    with pytest.raises(UserError, match=message):
        fit.check_fit(parse_config(TINY), "v3-8")


@pytest.mark.usefixtures("libtpu")
@pytest.mark.tpu
def test_a_run_that_fits_and_one_that_does_not(caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO):
        fit.check_fit(parse_config(TINY, ["mesh.tp=8"]), "v3-8")
    assert "v3-8: 0.0" in caplog.text
    assert "tokens/s, MFU" in caplog.text
    with pytest.raises(UserError, match=r"does not fit v4-8: .*needs a multiple of 8 devices, found 4.*--no-preflight"):
        fit.check_fit(parse_config(TINY, ["mesh.tp=8"]), "v4-8")
