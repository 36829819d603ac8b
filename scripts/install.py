#!/usr/bin/env python3
"""Install packages into the environment of the Python that runs this: PYTHON scripts/install.py [pip install arguments]

uv installs them, if pip can get it, in a quarter of pip's time. It reads no setting of pip, so this program gives it
the indexes, links and constraints that pip has. With a setting that uv does not have, or after an error of uv, pip
installs them. PyTorch is the build without CUDA, where its index can be reached.
"""

import ast
import os
import subprocess
import sys
import urllib.error
import urllib.request

# uv's option for each setting of pip, whose value is a list of words
_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
    "no-binary": "--no-binary",
    "only-binary": "--only-binary",
}
# uv's variable for each
_VARIABLES = {"cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY", "timeout": "UV_HTTP_TIMEOUT"}
_VARIABLES["default-timeout"] = _VARIABLES["timeout"]
# those that do not change what is installed
_OTHERS = {
    "config-file",
    "disable-pip-version-check",
    "quiet",
    "verbose",
    "no-input",
    "cache-dir",
    "no-cache-dir",
    "progress-bar",
}
_OTHERS |= {"root-user-action", "no-color", "retries", "require-virtualenv", "break-system-packages", "no-compile"}
# CUDA's packages take 6 GB
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def settings() -> dict[str, str]:
    """pip's settings for `install`: those of a file for all commands, for `install`, and of the environment."""
    listed = subprocess.run([*_PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    by_section: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for key, value in (line.split("=", 1) for line in listed.splitlines()):
        section, _, name = key.partition(".")
        if section in by_section:
            by_section[section][name.lower()] = ast.literal_eval(value)
    return {name: value for section in by_section.values() for name, value in section.items()}


def for_uv(given: dict[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """The options and variables that give uv these settings of pip; None: it has none for one of them."""
    # pip takes the best version of all indexes
    options, variables = ["--index-strategy", "unsafe-best-match"], {}
    for name, value in given.items():
        if name in _OPTIONS:
            options += [part for word in value.split() for part in (_OPTIONS[name], word)]
        elif name in _VARIABLES:
            variables[_VARIABLES[name]] = value
        elif name not in _OTHERS:
            return None
    return options, variables


def has_cpu_index() -> bool:
    """Whether the index of PyTorch without CUDA can be reached."""
    try:
        urllib.request.urlopen(f"{_CPU_INDEX}/torch/", timeout=5).close()
    except (OSError, urllib.error.URLError):
        return False
    return True


def main(arguments: list[str]) -> int:
    """Install; the exit code."""
    pip = [*_PIP, "install", "--quiet", "--quiet"]
    if any("torch" in argument for argument in arguments) and has_cpu_index():
        arguments = ["--extra-index-url", _CPU_INDEX, *arguments]
    given = for_uv(settings())
    if given is not None and subprocess.run([*pip, "uv>=0.9"], capture_output=True).returncode == 0:
        options, variables = given
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        if subprocess.run([*uv, *options, *arguments], env={**os.environ, **variables}).returncode == 0:
            return 0
        sys.stderr.write("uv cannot install them: trying pip\n")
    return subprocess.run([*pip, *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
