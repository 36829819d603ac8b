"""gs:// paths on a machine without Google credentials: one line, exit code 2, from every command."""

import importlib
import os
import subprocess
import sys

import pytest
from support.commands import REPO, write_run

from mesh_transformer import files
from mesh_transformer.errors import CredentialsError
from mesh_transformer.runtime import cli

BUCKET = ["--config", "config.json", "--set", "checkpoint.bucket=models"]
COMMANDS = [
    ["device_train", *BUCKET],
    ["device_train", "--config", "config.json", "--set", "data.train_set=gs://texts/a.txt"],
    ["device_train", "--config", "config.json", "--tune-model-path", "gs://models/run"],
    ["train", *BUCKET],
    ["train", *BUCKET, "--new", "--yes"],
    ["train", *BUCKET, "--processes", "2"],
    ["device_sample", *BUCKET, "--prompt", "a"],
    ["device_serve", "--config", "gs://models/config.json"],
    ["eval_harness", "--config", "gs://models/config.json"],
    ["slim_model", *BUCKET],
    ["resharding_example", "--config", "config.json", "--ckpt", "gs://models/run", "--out", "out/step_1"],
    ["to_hf_weights", "--config", "config.json", "--input-ckpt", "gs://models/run", "--output-path", "out"],
    ["from_hf_weights", "--input", "gs://models/hf", "--output-path", "out"],
    ["create_finetune_tfrecords", "text.txt", "a", "--tokenizer", "bytes", "--output-dir", "gs://texts"],
    ["prepare_dataset", "--input", "text.txt", "--tokenizer", "bytes", "--output", "gs://texts/set", "--workers", "1"],
]


@pytest.fixture
def no_credentials(tmp_path, monkeypatch):
    """A folder with a config and a text, on a machine without credentials."""
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    files._cached_client.cache_clear()
    yield tmp_path
    files._cached_client.cache_clear()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_says_so_in_one_line(no_credentials, monkeypatch, capfd, command):
    monkeypatch.setattr(sys, "argv", [f"{command[0]}.py", *command[1:]])
    with pytest.raises(SystemExit) as ended:
        cli.run(importlib.import_module(command[0]).main)
    errors = capfd.readouterr().err
    assert ended.value.code == 2, errors
    assert "Traceback" not in errors
    (line,) = [line for line in errors.splitlines() if "gs://" in line and " I reading gs://" not in line]
    assert line.startswith("error: no access to gs:// paths: File ")
    assert "gcloud auth application-default login" in line
    assert "local" in line
    assert errors.splitlines()[-1] == line


def test_nothing_to_find_them_by(tmp_path):
    """There is no variable or file of gcloud, and no metadata server. The error comes before the texts, which are too
    short."""
    (tmp_path / "text.txt").write_text("a b c")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GOOGLE_", "STORAGE_"))}
    child = subprocess.run(
        [sys.executable, str(REPO / "create_finetune_tfrecords.py"), "text.txt", "a", "--tokenizer", "bytes",
         "--output-dir", "gs://texts"],
        cwd=tmp_path, env={**kept, "CLOUDSDK_CONFIG": str(tmp_path), "NO_GCE_CHECK": "true"}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert child.returncode == 2
    assert child.stderr.splitlines()[-1].startswith("error: no access to gs:// paths: Your default credentials were")


def test_credentials_that_have_expired(no_credentials, monkeypatch):
    """The library asks for a token at the first request."""
    from google.auth.credentials import Credentials
    from google.auth.exceptions import RefreshError

    class Expired(Credentials):
        def refresh(self, request):
            raise RefreshError("Reauthentication is needed.", {"error": "invalid_grant"})

    monkeypatch.setattr("google.auth.default", lambda *_, **__: (Expired(), "project"))
    with pytest.raises(CredentialsError, match=r"Reauthentication is needed.*gcloud auth application-default login"):
        files.exists("gs://models/run/x")
