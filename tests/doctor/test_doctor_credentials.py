"""Credentials are found and not shown; services are asked only when the user says so."""

import http.server
import json
import os
import socket
import threading
from pathlib import Path

import pytest
from support.doctored import findings, problems

from mesh_transformer.doctor import credentials, network
from mesh_transformer.doctor.checks import checks, report
from mesh_transformer.doctor.findings import warning

VARIABLES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HOME", "HF_TOKEN_PATH", "WANDB_API_KEY", "NETRC", "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG",
    "GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT", "SSH_AUTH_SOCK", "XDG_CACHE_HOME",
)  # fmt: skip
SECRET = "sekret-0123456789"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user without credentials."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(credentials, "PRODUCT", tmp_path / "product_name")
    return tmp_path


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def google_file(kind: str) -> str:
    return json.dumps({"type": kind, "private_key": SECRET, "refresh_token": SECRET})


def test_a_user_without_credentials_has_no_problem(home: Path) -> None:
    for name in ("hugging face", "wandb", "aws", "google", "pods"):
        assert [line.level for line in findings(name)] == ["ok"], name


@pytest.mark.parametrize(
    ("check", "variable"),
    [
        ("hugging face", "HF_TOKEN"),
        ("hugging face", "HUGGING_FACE_HUB_TOKEN"),
        ("wandb", "WANDB_API_KEY"),
        ("aws", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_a_variable(home: Path, monkeypatch: pytest.MonkeyPatch, check: str, variable: str) -> None:
    monkeypatch.setenv(variable, SECRET)
    assert findings(check) == [("ok", f"in the variable {variable}", "")]


@pytest.mark.parametrize(
    ("check", "file", "text"),
    [
        ("hugging face", ".cache/huggingface/token", SECRET),
        ("wandb", ".netrc", f"machine api.wandb.ai\n  login user\n  password {SECRET}\n"),
        ("aws", ".aws/credentials", f"[default]\naws_secret_access_key = {SECRET}\n"),
        ("google", ".config/gcloud/application_default_credentials.json", google_file("authorized_user")),
    ],
)
def test_a_file(home: Path, check: str, file: str, text: str) -> None:
    path = write(home / file, text)
    (line,) = findings(check)
    assert line.level == "ok"
    assert line.found.endswith(f" {path}")
    path.chmod(0o644)
    (line,) = findings(check)
    assert line == ("warning", f"others of this machine can use {path}", f"chmod 600 {path}")


def test_other_places_of_the_token(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(home / "elsewhere" / "token", SECRET)
    monkeypatch.setenv("HF_HOME", str(path.parent))
    assert findings("hugging face")[0].found == f"in the file {path}"
    other = write(home / "other", SECRET)
    monkeypatch.setenv("HF_TOKEN_PATH", str(other))
    assert findings("hugging face")[0].found == f"in the file {other}"


def test_credentials_of_google(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = home / "key.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    (fault,) = problems("google")
    assert f"names {path}, which is not a file" in fault.found
    write(path, google_file("service_account"))
    assert findings("google") == [("ok", f"service_account in {path} (GOOGLE_APPLICATION_CREDENTIALS)", "")]
    for text in ("", "[1]", "{}", google_file(SECRET)):
        write(path, text)
        (fault,) = problems("google")
        assert "is not a file of Google credentials" in fault.found
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    write(home / "product_name", "Google Compute Engine\n")
    assert findings("google")[0].found == "the service account of this Google VM"


def test_what_pods_need(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = findings("pods")
    assert line.mend == "for TPU pods ssh-keygen -t ed25519 -f ~/.ssh/google_compute_engine"
    key = write(home / ".ssh" / "id_ed25519", SECRET)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "mine")
    (line,) = findings("pods")
    assert line.found.startswith(f"the project in GOOGLE_CLOUD_PROJECT, SSH keys: {key}, ")
    assert line.mend == ""
    key.chmod(0o640)
    assert findings("pods")[0].mend == f"chmod 600 {key}"


def test_a_secret_that_a_program_prints_is_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setenv("DEPLOY_KEY", str(tmp_path))

    def check():
        yield warning(f"it says {SECRET} of {tmp_path}", f"curl -H {SECRET} https://me:pass@host/a@b")
        raise RuntimeError(SECRET)

    (_, line), (_, failed) = report({"leak": check})
    assert line == ("warning", f"it says <MY_API_KEY> of {tmp_path}", "curl -H <MY_API_KEY> https://host/a@b")
    assert failed.level == "warning"
    assert failed.found == "this check failed: RuntimeError: <MY_API_KEY>"


def test_nothing_uses_the_network(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    table = checks(0, online=False)
    del table["devices"]
    assert not [line for _, line in report(table) if "failed" in line.found]
    assert "failed" in findings("network")[0].found


class Refusing(http.server.BaseHTTPRequestHandler):
    """A service that answers every request with 404."""

    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def test_services_that_answer_and_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        addresses = [f"http://127.0.0.1:{number}" for number in (server.server_port, closed.getsockname()[1])]
        monkeypatch.setenv("HF_ENDPOINT", addresses[0])
        services = (("the hub", "HF_ENDPOINT", ""), ("the API", "", addresses[1]))
        monkeypatch.setattr(network, "SERVICES", services)
        answers, silent = findings("network")
        server.shutdown()
    assert answers == ("ok", "the hub answers", "")
    assert silent.level == "warning"
    assert silent.found.startswith("the API does not answer: ")
