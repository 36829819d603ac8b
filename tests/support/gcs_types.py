"""Types that gcs_server.py and gcs_handler.py share."""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# the "status" of a connection that is closed without an answer
CUT = 0
# the "status" of a connection that is closed after half of the answer's body
HALF = -1

# bucket, object name
Key = tuple[str, str]


class Blob(NamedTuple):
    """One object."""

    data: bytes
    generation: int
    content_type: str
    metadata: dict[str, str] | None


@dataclass
class Upload:
    """A resumable upload in progress."""

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
    """(headers, content) of each part. Lines may end with a bare newline, which gcsfs writes."""
    found = re.search(r"boundary=[\"']?([^\"';]+)", content_type)
    if found is None:
        raise HttpError(400, "badRequest")
    parts = []
    for part in re.split(rb"(?:\r?\n|^)--" + re.escape(found[1].encode()), body)[1:-1]:
        headers, _, content = re.split(rb"(\r?\n\r?\n)", part, maxsplit=1)
        parts.append((headers.decode(), content))
    return parts
