"""What gcs_server.py and gcs_handler.py share."""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CUT = 0  # the "status" of a connection closed without an answer
HALF = -1  # of one closed after half of the answer's body

Key = tuple[str, str]  # bucket, object name


class Blob(NamedTuple):
    """One object."""

    data: bytes
    generation: int
    content_type: str
    metadata: dict[str, str] | None


@dataclass
class Upload:
    """A resumable upload under way."""

    key: Key
    resource: dict[str, Any]
    query: dict[str, str]
    data: bytearray = field(default_factory=bytearray)


class HttpError(Exception):
    """Answer with this status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def split_multipart(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """(headers, content) of each part; lines may end in a bare newline, as gcsfs writes them."""
    found = re.search(r"boundary=[\"']?([^\"';]+)", content_type)
    if found is None:
        raise HttpError(400, "badRequest")
    parts = []
    for part in re.split(rb"(?:\r?\n|^)--" + re.escape(found[1].encode()), body)[1:-1]:
        headers, _, content = re.split(rb"(\r?\n\r?\n)", part, maxsplit=1)
        parts.append((headers.decode(), content))
    return parts
