"""By which names the server may be asked (DNS rebinding)."""

from collections.abc import Iterator

import pytest
from support.served import KEY, Served, refusal, serve
from support.wire import connect, read_to_end

from mesh_transformer.errors import UserError
from mesh_transformer.runtime.serving.hosts import HostNames
from mesh_transformer.runtime.serving.keys import ApiKeys
from mesh_transformer.runtime.serving.start import ServeOptions

BODY = {"prompt": "a", "max_tokens": 3}
THIS_MACHINE = ["localhost", "LOCALHOST:5000", "a.localhost", "127.0.0.1:80", "[::1]", "[::1]:5000", "localhost.:1"]
OTHERS = [
    "evil.example", "evil.example:5000", "localhost.evil.example", "evillocalhost", "127.0.0.1.evil.example",
    "127.0.0.2", "10.0.0.5", "[::2]", "0.0.0.0", "[fe80::1]", "a b", "localhost:5000/", "user@localhost", "",
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve() as served:
        yield served


@pytest.fixture(scope="module")
def named() -> Iterator[Served]:
    with serve(allow_hosts=["chat.example", "fd00::5"]) as served:
        yield served


@pytest.mark.parametrize("host", THIS_MACHINE)
def test_this_machine(server: Served, host: str) -> None:
    assert server.client.post("/v1/completions", json=BODY, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_are_refused_on_every_path(server: Served, host: str) -> None:
    calls = server.engine.calls
    for method, path in [("POST", "/v1/completions"), ("GET", "/"), ("GET", "/health"), ("OPTIONS", "/complete")]:
        response = server.client.request(method, path, json=BODY, headers={"Host": host})
        error = refusal(response, 403)
        assert error["code"] == "host_not_allowed"
        assert "--allow-host " in error["message"]
        assert "access-control-allow-origin" not in response.headers
    assert server.engine.calls == calls


def test_a_request_without_a_name(server: Served) -> None:
    """HTTP/1.0 has them; a browser does not send them."""
    with connect(server.url) as client:
        client.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert read_to_end(client).startswith(b"HTTP/1.1 200 ")


def test_a_name_that_is_allowed_is_of_the_server_itself(named: Served) -> None:
    for host, status in {
        "chat.example": 200,
        "CHAT.example:443": 200,
        "[fd00::5]:80": 200,
        "a.chat.example": 403,
    }.items():
        assert named.client.post("/v1/completions", json=BODY, headers={"Host": host}).status_code == status
    origins = {
        "https://chat.example": True, "http://chat.example:8080": True, "https://other.example": False,
        "https://a.chat.example": False, "null": False, "https://chat.example.evil.example": False,
    }  # fmt: skip
    for origin, own in origins.items():
        headers = {"Host": "chat.example", "Origin": origin}
        answer = named.client.post("/v1/completions", json=BODY, headers=headers)
        assert answer.headers.get("access-control-allow-origin") == (origin if own else None)


@pytest.mark.parametrize("options", [{"keys": [KEY]}, {"allow_hosts": ["*"]}])
def test_every_name(options: dict) -> None:
    with serve(**options) as served:
        headers = {"Host": "evil.example", "Authorization": f"Bearer {KEY}"}
        assert served.client.post("/v1/completions", json=BODY, headers=headers).status_code == 200


def test_the_name_of_the_option_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listener:
        def __init__(self, address: str):
            self.address = address

        def getsockname(self) -> tuple[str, int]:
            return self.address, 5000

    def answers(options: ServeOptions, address: str, name: str, *keys: bytes) -> bool:
        names: HostNames = options.names(Listener(address), ApiKeys(keys))  # type: ignore[arg-type]
        return names._has(name)

    assert answers(ServeOptions(host="box"), "127.0.1.1", "box")
    assert not answers(ServeOptions(host="box"), "127.0.1.1", "other")
    # other machines reach it: they know it by any name
    assert answers(ServeOptions(host="box"), "10.0.0.5", "other")
    assert not answers(ServeOptions(host="box", allow_hosts=["a.example"]), "10.0.0.5", "other")
    assert not answers(ServeOptions(allow_hosts=["a.example"]), "127.0.0.1", "other", b"key")


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "a/b", "", "a b", "*.example"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(UserError, match="^--allow-host .*without a scheme and a port"):
        ServeOptions(allow_hosts=[name])
