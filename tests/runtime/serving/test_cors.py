"""Which web pages may read the answers (CORS)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from support.served import KEY, Served, serve

from mesh_transformer.errors import UserError
from mesh_transformer.runtime.serving.start import ServeOptions

ALLOW = "access-control-allow-origin"
DEMO, EXTENSION = "https://6b.eleuther.ai", "chrome-extension://abcdefgh"
BODY = {"prompt": "a", "context": "a", "top_p": 1, "temp": 1, "length": 3, "max_tokens": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve() as served:
        yield served


@pytest.fixture(scope="module")
def open_to_some() -> Iterator[Served]:
    with serve(allow_origins=[DEMO, EXTENSION, "http://demo.example:8080", "null"]) as served:
        yield served


def answers(server: Served, headers: Any) -> list[httpx.Response]:
    """A completion, a preflight, and three errors."""
    return [
        server.client.post("/complete", json=BODY, headers=headers),
        server.client.options("/v1/completions", headers=headers),
        server.client.post("/v1/completions", json={"prompt": 3}, headers=headers),
        server.client.get("/v1/nothing", headers=headers),
        server.client.get("/complete", headers=headers),
    ]


def statuses(responses: list[httpx.Response]) -> list[int]:
    return [response.status_code for response in responses]


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost",
        "http://localhost:3000",
        "https://localhost:8443",
        "http://app.localhost:5173",
        "https://a.b-c.localhost",
        "http://127.0.0.1:8000",
        "https://127.0.0.1",
        "http://[::1]",
        "http://[::1]:8000",
    ],
)
def test_pages_of_this_machine_may_read(server: Served, origin: str) -> None:
    responses = answers(server, {"Origin": origin})
    assert statuses(responses) == [200, 204, 400, 404, 405]
    for response in responses:
        assert response.headers[ALLOW] == origin
        assert response.headers["vary"] == "Origin"
    assert responses[1].headers["access-control-allow-methods"] == "*"
    assert responses[1].headers["access-control-allow-headers"] == "*, Authorization"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        *(
            [("Origin", origin)]
            for origin in (
                "",
                "null",
                "*",
                DEMO,
                "http://evil.example",
                "http://localhost.evil.example",
                "http://evillocalhost",
                "http://.localhost",
                "http://127.0.0.1.evil.example",
                "http://127.0.0.1x",
                "http://127a0b0c1",
                "http://127.0.0.2",
                "http://0.0.0.0",
                "http://[::]",
                "http://[::1].evil.example",
                "http://evil.example#localhost",
                "http://evil.example/localhost",
                "http://evil.example?.localhost",
                "http://localhost@evil.example",
                "http://user@localhost",
                "http://evil.example:80@localhost",
                "http://localhost/",
                "http://localhost:",
                "http://localhost:x",
                "http://localhost:3000:1",
                "http://LOCALHOST",
                "HTTP://localhost",
                "http://localhost http://evil.example",
                "http://evil.example, http://localhost",
                "localhost",
                "ftp://localhost",
                "file://localhost",
                "http:localhost",
                "http:///localhost",
                "http://\xecocalhost",
            )
        ),
        [("Origin", "http://localhost"), ("Origin", "http://evil.example")],
        [("Origin", "http://localhost"), ("Origin", "http://localhost")],
    ],
)
def test_other_pages_get_the_same_status_without_the_headers(server: Served, headers: list[tuple[str, str]]) -> None:
    raw = [(name, value.encode("latin-1")) for name, value in headers]
    responses = answers(server, raw)
    assert statuses(responses) == [200, 204, 400, 404, 405]
    for response in responses:
        assert not [name for name in response.headers if name.startswith("access-control-")]
        assert response.headers["vary"] == "Origin"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_servers_own_origin_behind_a_proxy_too(scheme: str) -> None:
    asked = {"Host": "models.example", "X-Forwarded-Proto": scheme}
    with serve(allow_hosts=["*"]) as server:
        for origin, allowed in {
            f"{scheme}://models.example": True,
            f"{scheme}://models.example:8080": False,
            f"{scheme}://other.example": False,
        }.items():
            responses = answers(server, {**asked, "Origin": origin})
            assert statuses(responses) == [200, 204, 400, 404, 405]
            for response in responses:
                assert response.headers.get(ALLOW) == (origin if allowed else None)


def test_allowed_origins_may_read_and_no_others(open_to_some: Served) -> None:
    for origin in (DEMO, EXTENSION, "http://demo.example:8080", "null", "http://localhost:3000"):
        for response in answers(open_to_some, {"Origin": origin}):
            assert (response.headers[ALLOW], response.headers["vary"]) == (origin, "Origin")
    for origin in ("http://6b.eleuther.ai", f"{DEMO}:8443", f"{DEMO}/", "http://demo.example", "http://a.demo.example"):
        for response in answers(open_to_some, {"Origin": origin}):
            assert ALLOW not in response.headers


@pytest.mark.parametrize("options", [{"keys": [KEY]}, {"allow_origins": [DEMO, "*"]}])
def test_all_pages_may_read_if_there_is_a_key_or_the_user_says_so(options: Any) -> None:
    with serve(**options) as server:
        for headers in ({}, {"Origin": "http://evil.example"}, {"Origin": "http://localhost"}):
            responses = answers(server, headers)
            assert {response.headers[ALLOW] for response in responses} == {"*"}
            assert all("vary" not in response.headers for response in responses)
        for path in ("/", "/metrics", "/version", "/nothing"):
            assert ALLOW not in server.client.get(path).headers


def test_with_a_key_allowed_origins_are_the_only_ones() -> None:
    with serve(keys=[KEY], allow_origins=[DEMO]) as server:
        for origin, allowed in ((DEMO, DEMO), ("http://localhost", "http://localhost"), ("http://evil.example", None)):
            headers = {"Authorization": f"Bearer {KEY}", "Origin": origin}
            responses = [*answers(server, headers), server.post(BODY, headers={"Origin": origin})]
            assert statuses(responses) == [200, 204, 400, 404, 405, 401]
            assert {response.headers.get(ALLOW) for response in responses} == {allowed}


def test_pages_of_other_origins_may_call_the_apis_alone(server: Served) -> None:
    asked = {"Origin": "http://localhost"}
    for path in ("/v1/models", "/v1/nothing", "/complete", "/tokenize", "/detokenize", "/health"):
        assert server.client.get(path, headers=asked).headers[ALLOW] == "http://localhost"
    for path in ("/", "/metrics", "/version", "/nothing"):
        response = server.client.get(path, headers=asked)
        assert ALLOW not in response.headers
        assert "vary" not in response.headers


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        DEMO,
        EXTENSION,
        "http://intranet",
        "http://10.0.0.5:3000",
        "https://xn--bcher-kva.example:8443",
        "http://[fd00::1]:3000",
        "https://example.org:80",
    ],
)
def test_an_origin_as_a_browser_sends_it_can_be_allowed(origin: str) -> None:
    assert ServeOptions(allow_origins=[origin]).allow_origins == [origin]


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "example.org",
        "https://",
        "https:example.org",
        "https://example.org/",
        "https://example.org/page",
        "https://example.org?",
        "https://example.org#x",
        "https://user@example.org",
        "https://Example.org",
        "HTTPS://example.org",
        "https://example.org:443",
        "http://example.org:80",
        "http://example.org:",
        "http://example.org:0",
        "http://example.org:65536",
        "http://example.org:x",
        "https://*.example.org",
        "https://.example.org",
        "https://b\xfccher.example",
        "http://127.1",
        "http://256.0.0.1",
        "http://[::1",
        "http://[1]",
        "http://::1",
        "https://a.example,https://b.example",
        "https://a.example https://b.example",
        "https://example.org\n",
        " https://example.org",
        "Null",
        "**",
    ],
)
def test_another_origin_is_refused_with_what_is_allowed(origin: str) -> None:
    with pytest.raises(UserError) as refused:
        ServeOptions(allow_origins=[DEMO, origin])
    assert f"--allow-origin {origin!r}: must be an origin as a browser sends it" in str(refused.value)


@contextmanager
def site() -> Iterator[int]:
    """A web site of another origin, with an empty page. Yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield httpd.server_port
        httpd.shutdown()


FETCH = """async ([url, options, type]) => {
  if (type !== undefined) options.body = new Blob([options.body], {type});
  try {
    const response = await fetch(url, options);
    return [response.status, await response.text()];
  } catch (error) {
    return error.name;
  }
}"""


def fetch(page: Any, url: str, *, body: str | None = None, kind: str | None = None, **options: Any) -> Any:
    """The status and text that a script of a page gets, or the name of the error.

    `kind`: the Content-Type of the body; empty: the browser sends none.
    """
    options |= {} if body is None else {"method": "POST", "body": body}
    return page.evaluate(FETCH, [url, options, *([] if kind is None else [kind])])


def test_in_a_browser_only_allowed_pages_read(open_page: Any) -> None:
    """All names of the domain `example` lead to this machine in the test's browser."""
    json = {"body": '{"prompt": "a", "max_tokens": 2}', "kind": "application/json"}
    with site() as port, serve(allow_origins=[f"http://demo.example:{port}"]) as server:
        for host in ("localhost", "app.localhost", "127.0.0.1", "demo.example"):
            page = open_page(f"http://{host}:{port}")
            status, text = fetch(page, f"{server.url}/v1/completions", **json)
            assert status == 200
            assert '"text_completion"' in text
            assert fetch(page, f"{server.url}/v1/models/other")[0] == 404
            assert page.faults == ["Failed to load resource: the server responded with a status of 404 (Not Found)"]
        calls = len(server.engine.calls)
        for host in ("evil.example", "localhost.evil.example"):
            page = open_page(f"http://{host}:{port}")
            for path in ("/v1/models", "/health", "/v1/nothing"):
                assert fetch(page, server.url + path) == "TypeError"
            assert fetch(page, f"{server.url}/v1/completions", **json) == "TypeError"
            # no preflight precedes these, so the server must refuse them
            for kind in ("", "text/plain"):
                assert fetch(page, f"{server.url}/v1/completions", **{**json, "kind": kind}) == "TypeError"
                sent = fetch(page, f"{server.url}/v1/completions", **{**json, "kind": kind}, mode="no-cors")
                assert sent == [0, ""]
            assert all("has been blocked by CORS policy" in fault for fault in page.faults if "Access to" in fault)
        assert len(server.engine.calls) == calls


def test_in_a_browser_the_servers_page_answers_under_a_name_that_is_allowed(open_page: Any) -> None:
    with serve(allow_hosts=["models.example"]) as server:
        page = open_page(server.url.replace("127.0.0.1", "models.example"))
        page.fill("#prompt", "Hello")
        page.fill("[name=max_tokens]", "1")
        page.click("#go")
        page.locator("#status", has_text="1 token, stopped at max tokens").wait_for()
        assert page.faults == []
