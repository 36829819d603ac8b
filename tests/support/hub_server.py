"""A loopback server for the part of the Hugging Face hub's API that `mesh_transformer.hub` uses. For tests only.

Repositories are in memory, with branches and commits. Supported: model info, trees, downloads (HEAD, GET, ranges),
private and gated repositories, creation, uploads (regular and LFS files) and deletions.
A data set has the name `datasets/org/name` in `commit`.
Not supported: Xet, tags of users, pages of a listing, spaces.

    with HubServer() as server:
        server.environment(home)                                  # variables for this process and its children
        server.commit("org/name", {"config.json": b"{}"})         # a commit on main
        server.requests                                           # ["GET /api/models/org/name/revision/main", ...]
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_of_a_test"
# files of other types are regular files in the repository
LFS = (".safetensors", ".bin")


@dataclass
class Repo:
    """One repository: the files of each commit, and the newest commit of each branch."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


class HubServer:
    """The server and its repositories."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.uploads: dict[str, bytes] = {}
        self.requests: list[str] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def clear(self) -> None:
        """Delete all repositories."""
        for held in (self.repos, self.uploads, self.requests):
            held.clear()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables that make the library of a new process use this server, with a cache in `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    @contextmanager
    def used(self, home: Path) -> Iterator[None]:
        """The same for this process, in which the library may have read its variables already."""
        from huggingface_hub import constants

        from mesh_transformer import hub

        changed = {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("HF_TOKEN", raising=False)
            for name, value in self.environment(home).items():
                patch.setenv(name, value)
            for name, value in changed.items():
                patch.setattr(constants, name, value)
            hub.forget()
            yield
        hub.forget()

    def commit(self, repo: str, files: Mapping[str, bytes], *, branch: str = "main", **settings: bool) -> str:
        """Make a commit with exactly these files, and return its hash."""
        found = self.repos.setdefault(repo, Repo())
        for name, value in settings.items():
            setattr(found, name, value)
        number = f"{repo} {branch} {len(found.commits)}"
        commit = hashlib.sha1(number.encode()).hexdigest()  # noqa: S324
        found.commits[commit], found.branches[branch] = dict(files), commit
        return commit

    def commit_folder(self, repo: str, folder: Path, **settings: Any) -> str:
        """Make a commit with the files of a folder."""
        return self.commit(repo, {path.name: path.read_bytes() for path in folder.iterdir()}, **settings)

    def downloads(self) -> list[str]:
        """The names of the files that were sent, in order."""
        found = (re.fullmatch(r"GET /.+/resolve/[^/]+/(.+)", line) for line in self.requests)
        return [match[1] for match in found if match]


class HubError(Exception):
    """An answer with an error: its status, and the code in the header X-Error-Code."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message or code)
        self.status, self.code = status, code


class Handler(BaseHTTPRequestHandler):
    """Routes a request to a method by its path."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    ROUTES = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create"),
        ("GET", r"/api/(?:models/)?(.+)/revision/(.+)", "info"),
        ("GET", r"/api/(?:models/)?(.+)/tree/([^/]+)", "tree"),
        ("POST", r"/api/models/(.+)/preupload/(.+)", "preupload"),
        ("POST", r"/api/models/(.+)/commit/(.+)", "commit"),
        ("POST", r"/(.+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/upload/(\w+)", "put"),
        ("GET", r"/api/(?:models/)?(.+)", "info"),
        ("GET", r"/(.+)/resolve/([^/]+)/(.+)", "resolve"),
    )

    def handle_request(self) -> None:
        path = urlsplit(self.path).path
        self.body = self.read_body()
        self.hub.requests.append(f"{self.command} {unquote(path)}")
        method = "GET" if self.command == "HEAD" else self.command
        try:
            for verb, pattern, name in self.ROUTES:
                if verb == method and (match := re.fullmatch(pattern, path)):
                    getattr(self, name)(*(unquote(group) for group in match.groups()))
                    return
            raise HubError(404, "EntryNotFound")
        except HubError as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": str(error)}
            self.answer(b'{"error": "refused"}', status=error.status, headers=headers)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repo(self, name: str, revision: str = "main", *, content: bool = False) -> Repo:
        """The repository that may be read. The hub hides private ones; of gated ones it hides the `content`."""
        found = self.hub.repos.get(name)
        if found is None or (found.private and not self.known):
            raise HubError(404 if self.known else 401, "RepoNotFound", "Repository not found")
        if content and found.gated and not self.known:
            raise HubError(401, "GatedRepo", f"Access to model {name} is restricted")
        if revision not in found.branches and revision not in found.commits:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def whoami(self) -> None:
        if not self.known:
            raise HubError(401, "", "Invalid credentials in Authorization header")
        self.json({"type": "user", "name": "org", "auth": {"type": "access_token"}})

    def info(self, name: str, revision: str = "main") -> None:
        repo = self.repo(name, revision)
        commit = repo.branches.get(revision, revision)
        siblings = [{"rfilename": file} for file in repo.commits[commit]]
        self.json({"_id": name, "id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []})

    def tree(self, name: str, revision: str) -> None:
        files = self.repo(name, revision).files(revision)
        self.json([entry(path, content) for path, content in files.items()])

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.repo(name, revision, content=True)
        commit = repo.branches.get(revision, revision)
        if path not in repo.commits[commit]:
            raise HubError(404, "EntryNotFound")
        content = repo.commits[commit][path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        begin, status = 0, 200
        stop = len(content)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, status = int(match[1]), 206
            stop = min(stop, int(match[2]) + 1) if match[2] else stop
            headers["Content-Range"] = f"bytes {begin}-{stop - 1}/{len(content)}"
        self.answer(content[begin:stop], "application/octet-stream", status=status, headers=headers)

    def create(self) -> None:
        if not self.known:
            raise HubError(401, "", "Invalid credentials in Authorization header")
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'org'}/{asked['name']}"
        if name in self.hub.repos:
            self.json({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, status=409)
            return
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.hub.commit(name, {}, private=private)
        self.json({"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def preupload(self, name: str, revision: str) -> None:
        self.repo(name, revision)
        asked = json.loads(self.body)["files"]
        modes = [(file["path"], "lfs" if file["path"].endswith(LFS) else "regular") for file in asked]
        answers = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes]
        self.json({"files": answers, "commitOid": self.repo(name).branches["main"]})

    def batch(self, name: str) -> None:
        self.repo(name)
        objects = json.loads(self.body)["objects"]
        actions = [{"upload": {"href": f"{self.hub.url}/upload/{one['oid']}"}} for one in objects]
        answers = [{**one, "actions": action} for one, action in zip(objects, actions, strict=True)]
        self.json({"transfer": "basic", "objects": answers})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, "", "the content does not have this hash")
        self.hub.uploads[oid] = self.body
        self.answer(b"", headers={"ETag": oid})

    def commit(self, name: str, revision: str) -> None:
        if not self.known:
            raise HubError(401, "", "Invalid credentials in Authorization header")
        files = dict(self.repo(name, revision).files(revision))
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            if operation["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.hub.commit(name, files, branch=revision)
        url = f"{self.hub.url}/{name}/commit/{commit}"
        self.json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def json(self, value: Any, *, status: int = 200) -> None:
        self.answer(json.dumps(value).encode(), status=status)

    def answer(
        self,
        body: bytes,
        kind: str = "application/json",
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        fields = {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def entry(path: str, content: bytes) -> dict[str, Any]:
    """A file in the listing of a tree."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if path.endswith(LFS):
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return found
