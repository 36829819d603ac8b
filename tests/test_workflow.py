"""The workflow of continuous integration."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

WORKFLOW = Path(__file__).parents[1] / ".github/workflows/ci.yml"
# sudo with secure_path, which sudoers of GitHub's runners sets: PATH is replaced even if it is to be preserved
SUDO = """#!/bin/bash
home=/root
[[ $1 != --preserve-env=*HOME* ]] || home=$HOME
while [[ $1 == -* ]]; do shift; done
exec env HOME="$home" PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
"""


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]["ci"]["steps"]


def test_the_workflow_fits_its_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def test_the_whole_history_is_fetched(steps) -> None:
    """`support/sample.py` counts the commits for the turn, and compares with an earlier commit."""
    (checkout,) = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert checkout.get("with", {}).get("fetch-depth") == 0


def test_ci_runs_with_the_python_of_the_workflow(steps, tmp_path: Path) -> None:
    """`.ci/run` finds programs by the PATH that setup-python wrote, and the cache below the user's HOME."""
    (command,) = [step["run"] for step in steps if "run" in step]
    sudo, script = tmp_path / "bin/sudo", tmp_path / ".ci/run"
    for file, text in ((sudo, SUDO), (script, 'echo "$HOME" "$PATH"\n')):
        file.parent.mkdir()
        file.write_text(text)
        file.chmod(0o755)
    path, home = f"{sudo.parent}:/tools/python/bin:{os.environ['PATH']}", str(tmp_path)
    ran = subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=tmp_path,
        env={"PATH": path, "HOME": home},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == f"{home} {path}\n"
