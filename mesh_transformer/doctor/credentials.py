"""Credentials: whether they are there, and where. Their values are never read into a finding."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from mesh_transformer import cache_folders
from mesh_transformer.cloud.hosts import KEY_FILES
from mesh_transformer.doctor.findings import Finding, ok, problem, warning
from mesh_transformer.errors import listed

_LOGIN = "gcloud auth application-default login"
# the kinds of google.auth (its default() reads `type`)
_GOOGLE_KINDS = {
    "authorized_user",
    "service_account",
    "external_account",
    "external_account_authorized_user",
    "impersonated_service_account",
    "gdch_service_account",
}
PRODUCT = Path("/sys/class/dmi/id/product_name")


def hugging_face() -> Iterator[Finding]:
    """The token of the Hugging Face hub, in the order of huggingface_hub."""
    file = os.path.expanduser(os.environ.get("HF_TOKEN_PATH") or os.path.join(cache_folders.hugging_face(), "token"))
    needs = "private and gated models, and push, need one"
    yield _present(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), file, needs, "hf auth login")


def wandb() -> Iterator[Finding]:
    """The key of Weights & Biases."""
    names = [os.environ.get("NETRC") or "~/.netrc", "~/_netrc"]
    file = next((path for path in map(os.path.expanduser, names) if "api.wandb.ai" in _text(path)), "")
    yield _present(("WANDB_API_KEY",), file, "logging.wandb_project needs one", "wandb login")


def aws() -> Iterator[Finding]:
    """Credentials of AWS."""
    file = os.path.expanduser(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials")
    yield _present(("AWS_ACCESS_KEY_ID", "AWS_PROFILE"), file, "no command reads s3:// paths", "")


def _present(variables: tuple[str, ...], file: str, needs: str, login: str) -> Finding:
    """Whether one of the variables, or else a file, has credentials. The first one that exists counts."""
    name = next((name for name in variables if os.environ.get(name)), None)
    if name is not None:
        return ok(f"in the variable {name}")
    if not file or not os.path.isfile(file):
        return ok(f"none; {needs}", login)
    return _private(file) or ok(f"in the file {file}")


def google() -> Iterator[Finding]:
    """The application default credentials of Google, in the order of google.auth."""
    variable = "GOOGLE_APPLICATION_CREDENTIALS"
    named = os.environ.get(variable)
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    path = named or os.path.join(folder, "application_default_credentials.json")
    if os.path.isfile(path):
        yield _of_file(path, f" ({variable})" if named else "")
    elif named:
        yield problem(f"{variable} names {named}, which is not a file", f"unset {variable}; {_LOGIN}")
    elif _text(PRODUCT).strip() in ("Google", "Google Compute Engine"):
        yield ok("the service account of this Google VM")
    else:
        yield ok("none; gs:// paths and TPUs of Google Cloud need them", _LOGIN)


def _of_file(path: str, source: str) -> Finding:
    try:
        kind = json.loads(_text(path))["type"]
    except (ValueError, KeyError, TypeError):
        kind = None
    if kind not in _GOOGLE_KINDS:
        return problem(f"{path}{source} is not a file of Google credentials", _LOGIN)
    return _private(path) or ok(f"{kind} in {path}{source}")


def pods() -> Iterator[Finding]:
    """What the commands for TPU pods need: a project, an SSH key, gcloud."""
    # Python 3.9 cannot import it
    from mesh_transformer.cloud.api import PROJECT_VARIABLES

    project = next((name for name in PROJECT_VARIABLES if os.environ.get(name)), None)
    keys = [path for path in map(os.path.expanduser, KEY_FILES) if os.path.isfile(path)]
    agent = ["the agent"] if os.environ.get("SSH_AUTH_SOCK") else []
    yield from filter(None, map(_private, keys[:1]))
    prerequisites = [
        f"the project in {project}" if project else "no project (--project, or GOOGLE_CLOUD_PROJECT)",
        f"SSH keys: {listed([*agent, *keys[:1]])}" if agent or keys else "no SSH key",
        "gcloud" if shutil.which("gcloud") else "no gcloud (optional)",
    ]
    create = "" if keys or agent else f"for TPU pods ssh-keygen -t ed25519 -f {KEY_FILES[0]}"
    yield ok(", ".join(prerequisites), create)


def _private(path: str) -> Finding | None:
    """A warning if other users of this machine can read the file."""
    if os.name == "nt" or not os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return None
    return warning(f"others of this machine can use {path}", f"chmod 600 {path}")


def _text(path: str | Path) -> str:
    """The first 64 KiB of a file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""
