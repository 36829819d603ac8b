"""The request handler of gcs_server.py."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import google_crc32c

from support.gcs_types import CUT, HALF, Blob, HttpError, Key, Upload, split_multipart

if TYPE_CHECKING:
    from support.gcs_server import GcsServer


class Handler(BaseHTTPRequestHandler):
    """Routes a request to a method by its path."""

    gcs: GcsServer
    protocol_version = "HTTP/1.1"
    # buffers the response: headers and body in separate packets take 40 ms per call
    wbufsize = -1
    disable_nagle_algorithm = True

    ROUTES = (
        (r"/batch.*", "batch"),
        (r"/upload/storage/v1/b/([^/]+)/o", "upload"),
        (r"/storage/v1/b/([^/]+)(?:/storageLayout)?", "bucket"),
        (r"/storage/v1/b/([^/]+)/o/?", "list_objects"),
        (r"/storage/v1/b/([^/]+)/o/(.+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/(.+)", "copy"),
        (r"/storage/v1/b/([^/]+)/o/(.+)/compose", "compose"),
        (r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)", "object"),
    )

    def handle_request(self) -> None:
        self.gcs.gate()
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        self.body = self.read_body()
        status = self.gcs.next_fault(self.command, self.path)
        self.half = status == HALF
        if status == CUT:
            self.close_connection = True
            return
        try:
            if status not in (None, HALF):
                raise HttpError(status, "injected")
            for pattern, name in self.ROUTES:
                if match := re.fullmatch(pattern, url.path):
                    getattr(self, name)(*(unquote(group) for group in match.groups()))
                    return
            raise HttpError(404, "notFound")
        except HttpError as error:
            details = {"code": error.status, "message": error.reason, "errors": [{"reason": error.reason}]}
            self.answer(error.status, {"error": details} if error.status != 304 else b"")

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = handle_request

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            length = int(self.headers.get("Content-Length") or 0)
            content = self.rfile.read(length)
            if len(content) < length:
                raise ConnectionResetError("the client disconnected in the middle of its request")
            return content
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def answer(self, status: int, body: Any = b"", headers: dict[str, str] | None = None) -> None:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        standard = {"Content-Type": "application/json", "Content-Length": str(len(payload))}
        for name, value in {**standard, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        with self.gcs.lock:
            self.gcs.bytes_read += len(payload)
        if self.half:
            self.close_connection = True
            payload = payload[: len(payload) // 2]
        if self.command != "HEAD":
            self.wfile.write(payload)

    # --- objects

    def resource(self, key: Key) -> dict[str, Any]:
        bucket, name = key
        blob = self.gcs.blobs[key]
        when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(blob.generation / 1e6))
        path = f"storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        crc = struct.pack(">I", google_crc32c.value(blob.data))
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{blob.generation}",
            "bucket": bucket,
            "name": name,
            "generation": str(blob.generation),
            "metageneration": "1",
            "etag": str(blob.generation),
            "size": str(len(blob.data)),
            "contentType": blob.content_type,
            "metadata": blob.metadata,
            "storageClass": "STANDARD",
            "timeCreated": when,
            "updated": when,
            "md5Hash": base64.b64encode(hashlib.md5(blob.data).digest()).decode(),
            "crc32c": base64.b64encode(crc).decode(),
            "selfLink": f"{self.gcs.url}/{path}",
            "mediaLink": f"{self.gcs.url}/download/{path}?alt=media",
        }

    def check_preconditions(self, key: Key, query: dict[str, str]) -> None:
        generation = self.gcs.blobs[key].generation if key in self.gcs.blobs else 0
        if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != generation:
            raise HttpError(412, "conditionNotMet")
        if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == generation:
            raise HttpError(304 if self.command in ("GET", "HEAD") else 412, "conditionNotMet")
        if "generation" in query and int(query["generation"]) != generation:
            raise HttpError(404, "notFound")

    def existing(self, key: Key) -> Blob:
        if key not in self.gcs.blobs:
            raise HttpError(404, "notFound")
        return self.gcs.blobs[key]

    def store(self, key: Key, data: bytes, resource: dict[str, Any], query: dict[str, str]) -> None:
        with self.gcs.lock:
            self.check_preconditions(key, query)
            kind = resource.get("contentType") or "application/octet-stream"
            self.gcs.blobs[key] = Blob(data, next(self.gcs.numbers), kind, resource.get("metadata"))
            self.answer(200, self.resource(key))

    def object(self, bucket: str, name: str) -> None:
        key = (bucket, name)
        with self.gcs.lock:
            blob = self.existing(key)
            self.check_preconditions(key, self.query)
            if self.command == "DELETE":
                del self.gcs.blobs[key]
                return self.answer(204)
            resource = self.resource(key)
        if self.query.get("alt") == "media":
            return self.media(blob, resource)
        return self.answer(200, resource)

    def media(self, blob: Blob, resource: dict[str, Any]) -> None:
        headers = {
            "Content-Type": blob.content_type,
            "ETag": resource["etag"],
            "x-goog-generation": resource["generation"],
            "x-goog-metageneration": "1",
            "x-goog-stored-content-length": resource["size"],
            "x-goog-hash": f"crc32c={resource['crc32c']},md5={resource['md5Hash']}",
        }
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        size = len(blob.data)
        if not wanted or not size:
            return self.answer(200, blob.data, headers)
        first = int(wanted[1]) if wanted[1] else max(0, size - int(wanted[2]))
        last = min(size - 1, int(wanted[2])) if wanted[1] and wanted[2] else size - 1
        if first >= size:
            raise HttpError(416, "requestedRangeNotSatisfiable")
        headers |= {
            "Content-Range": f"bytes {first}-{last}/{size}",
            "x-goog-hash": f"crc32c={resource['crc32c']}",
        }
        return self.answer(206, blob.data[first : last + 1], headers)

    def copy(self, bucket: str, name: str, to_bucket: str, to_name: str) -> None:
        target = (to_bucket, to_name)
        with self.gcs.lock:
            blob = self.existing((bucket, name))
            self.check_preconditions(target, self.query)
            self.gcs.blobs[target] = blob._replace(generation=next(self.gcs.numbers))
            resource = self.resource(target)
        if "/copyTo/" in self.path:
            return self.answer(200, resource)
        sizes = {"totalBytesRewritten": resource["size"], "objectSize": resource["size"]}
        return self.answer(200, {"kind": "storage#rewriteResponse", "done": True, "resource": resource, **sizes})

    def compose(self, bucket: str, name: str) -> None:
        request = json.loads(self.body)
        with self.gcs.lock:
            parts = [self.existing((bucket, part["name"])).data for part in request["sourceObjects"]]
            self.store((bucket, name), b"".join(parts), request.get("destination", {}), self.query)

    # --- buckets

    def bucket(self, bucket: str) -> None:
        self.answer(200, {"kind": "storage#bucket", "name": bucket, "hierarchicalNamespace": {"enabled": False}})

    def list_objects(self, bucket: str) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        first, end = self.query.get("startOffset", ""), self.query.get("endOffset")
        items, folders = [], {}
        with self.gcs.lock:
            for key in sorted(key for key in self.gcs.blobs if key[0] == bucket):
                name = key[1]
                if not name.startswith(prefix) or name < first or (end and name >= end):
                    continue
                head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                folder = prefix + head + found
                if found:
                    folders[folder] = True
                if not found or (name == folder and self.query.get("includeTrailingDelimiter") == "true"):
                    items.append(self.resource(key))
        self.answer(200, {"kind": "storage#objects", "items": items, "prefixes": list(folders)})

    # --- uploads

    def upload(self, bucket: str) -> None:
        kind = self.query.get("uploadType")
        # cancels a resumable upload
        if self.command == "DELETE":
            self.gcs.uploads.pop(self.query.get("upload_id", ""), None)
            self.answer(499)
        elif kind == "media":
            resource = {"contentType": self.headers.get("Content-Type")}
            self.store((bucket, self.query["name"]), self.body, resource, self.query)
        elif kind == "multipart":
            (_, text), (_, data) = split_multipart(self.headers["Content-Type"], self.body)
            resource = json.loads(text)
            self.store((bucket, resource.get("name") or self.query["name"]), data, resource, self.query)
        elif "upload_id" in self.query:
            self.continue_upload(self.query["upload_id"])
        else:
            resource = json.loads(self.body or b"{}")
            session = str(next(self.gcs.numbers))
            key = (bucket, resource.get("name") or self.query["name"])
            self.gcs.uploads[session] = Upload(key, resource, self.query)
            path = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={session}"
            self.answer(200, headers={"Location": self.gcs.url + path})

    def continue_upload(self, session: str) -> None:
        """A chunk, or a query of the received size (`Content-Range: bytes */N` without a body)."""
        if session not in self.gcs.uploads:
            raise HttpError(404, "notFound")
        upload = self.gcs.uploads[session]
        content_range = self.headers.get("Content-Range", "bytes 0-/" + str(len(self.body)))
        if first := re.match(r"bytes (\d+)-", content_range):
            del upload.data[int(first[1]) :]
            upload.data += self.body
        total = content_range.rpartition("/")[2]
        if total != "*" and len(upload.data) >= int(total):
            self.store(upload.key, bytes(upload.data), upload.resource, upload.query)
            del self.gcs.uploads[session]
        else:
            have = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
            self.answer(308, headers=have)

    def batch(self) -> None:
        """A batch of deletions, the only batch that gcsfs sends."""
        answers = []
        for headers, request in split_multipart(self.headers["Content-Type"], self.body):
            line = re.match(rb"DELETE \S*/storage/v1/b/([^/]+)/o/([^?\s]+)", request)
            if line is None:
                raise HttpError(400, "badRequest")
            with self.gcs.lock:
                gone = self.gcs.blobs.pop((unquote(line[1].decode()), unquote(line[2].decode())), None)
            identity = re.search(r"(?i)content-id: <?([^>\r\n]+)", headers)
            answers.append(
                "--part\r\nContent-Type: application/http\r\n"
                f"Content-ID: <response-{identity[1] if identity else ''}>\r\n\r\n"
                f"HTTP/1.1 {'204 No Content' if gone else '404 Not Found'}\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        body = "".join(answers) + "--part--\r\n"
        self.answer(200, body.encode(), {"Content-Type": "multipart/mixed; boundary=part"})
