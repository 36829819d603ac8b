"""The web page at `/`, and its files at `/page/`: styles, scripts and the libraries in `web/vendor`."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

_WEB = resources.files("mesh_transformer.runtime.serving") / "web"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    # A model's answer is text from a stranger. `markdown.js` makes it harmless; these rules hold if it fails: no
    # script, style or image from elsewhere or in the page, and no HTML from a text that DOMPurify has not cleaned.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # the browser does not look up the hosts of an answer's links
    "X-DNS-Prefetch-Control": "off",
    # the browser asks each time whether its copy is still right
    "Cache-Control": "no-cache",
}


class _File(NamedTuple):
    content: bytes
    headers: dict[str, str]

    def response(self, request: Request) -> Response:
        """The file, or 304 if the browser has it."""
        if request.headers.get("if-none-match") == self.headers["ETag"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def router() -> APIRouter:
    """The routes of the page."""
    routes = APIRouter()
    page = _read("page.html")
    names = [file.name for file in _WEB.iterdir()] + [f"vendor/{file.name}" for file in (_WEB / "vendor").iterdir()]
    files = {name: _read(name) for name in names if name.endswith((".css", ".js"))}

    @routes.get("/", response_class=HTMLResponse)
    async def index(request: Request) -> Response:
        return page.response(request)

    @routes.get("/page/{name:path}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404)
        return files[name].response(request)

    return routes


def _read(name: str) -> _File:
    content = (_WEB / name).read_bytes()
    kind = _KINDS[name[name.rindex(".") :]]
    named = {"Content-Type": f"{kind}; charset=utf-8", "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
    return _File(content, {**_HEADERS, **named})
