"""The workflows of continuous integration."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.stem: path for path in (ROOT / ".github/workflows").iterdir()}
# sudo with secure_path, which sudoers of GitHub's runners sets: PATH is replaced even if it is to be preserved
SUDO = """#!/bin/bash
home=/root
[[ $1 != --preserve-env=*HOME* ]] || home=$HOME
while [[ $1 == -* ]]; do shift; done
exec env HOME="$home" PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
"""


def _job(name: str) -> dict[str, Any]:
    return yaml.safe_load(WORKFLOWS[name].read_text())["jobs"][name]


def test_the_workflows_fit_their_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    subprocess.run([*command, *map(str, WORKFLOWS.values())], check=True, capture_output=True, text=True)


def test_every_part_runs_at_night_and_no_other_is_taken() -> None:
    text = (ROOT / ".ci/nightly").read_text()
    parts = _job("nightly")["strategy"]["matrix"]["part"]
    assert re.findall(r"^#   (\w+)", text, re.MULTILINE) == re.findall(r"^(\w+)\(\) {", text, re.MULTILINE) == parts
    refused = subprocess.run(["bash", ROOT / ".ci/nightly", "matrix", "all"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"all is no part: give some of {', '.join(parts)}\n"


@pytest.mark.parametrize(("name", "script"), [("ci", "run"), ("nightly", "nightly")])
def test_it_runs_with_the_python_of_the_workflow(name: str, script: str, tmp_path: Path) -> None:
    """The script finds programs by the PATH that setup-python wrote, and the cache below the user's HOME."""
    (command,) = [step["run"] for step in _job(name)["steps"] if "run" in step]
    command = re.sub(r"\${{ matrix\.\w+ }}", "3.13", command)
    sudo, script_file = tmp_path / "bin/sudo", tmp_path / ".ci" / script
    for file, text in ((sudo, SUDO), (script_file, 'echo "$HOME" "$PATH" "${PYTHON-none}"\n')):
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
    assert ran.stdout == f"{home} {path} {'python3.13' if name == 'ci' else 'none'}\n"
