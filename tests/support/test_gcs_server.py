"""The loopback server keeps the rules that atomic commits rest on."""

import urllib.error
import urllib.request

import pytest
from google.api_core.exceptions import NotFound, PreconditionFailed
from google.cloud import storage

from support.gcs_server import GcsServer


@pytest.fixture
def bucket(gcs: GcsServer) -> storage.Bucket:
    return storage.Client(project="test").bucket("bucket")


def test_preconditions(bucket: storage.Bucket) -> None:
    blob = bucket.blob("x")
    blob.upload_from_string(b"one", if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        blob.upload_from_string(b"two", if_generation_match=0)
    first = blob.generation
    blob.upload_from_string(b"two", if_generation_match=first)
    assert blob.generation > first
    with pytest.raises(PreconditionFailed):
        blob.delete(if_generation_match=first)
    with pytest.raises(NotFound):
        bucket.blob("x", generation=first).download_as_bytes()
    assert blob.download_as_bytes() == b"two"


def test_not_modified_and_ranges(gcs: GcsServer, bucket: storage.Bucket) -> None:
    bucket.blob("a b").upload_from_string(b"0123456789")
    generation = bucket.get_blob("a b").generation
    url = f"{gcs.url}/storage/v1/b/bucket/o/a%20b?alt=media"

    def get(query: str = "", wanted: str = "") -> tuple[int, bytes]:
        request = urllib.request.Request(url + query, headers={"Range": wanted} if wanted else {})
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, b""

    assert get() == (200, b"0123456789")
    assert get(f"&ifGenerationNotMatch={generation}") == (304, b"")
    assert get(f"&ifGenerationNotMatch={generation - 1}")[0] == 200
    assert get(wanted="bytes=2-4") == (206, b"234")
    assert get(wanted="bytes=7-") == (206, b"789")
    assert get(wanted="bytes=-2") == (206, b"89")
    assert get(wanted="bytes=10-") == (416, b"")


def test_listing(gcs: GcsServer, bucket: storage.Bucket) -> None:
    for name in ("a", "d/x", "d/y/z", "e"):
        gcs.put("bucket", name, b"")
    listing = bucket.list_blobs(delimiter="/")
    assert [blob.name for blob in listing] == ["a", "e"]
    assert listing.prefixes == {"d/"}
    assert [blob.name for blob in bucket.list_blobs(prefix="d/", start_offset="d/y")] == ["d/y/z"]
    assert [blob.name for blob in bucket.list_blobs(start_offset="b", end_offset="e")] == ["d/x", "d/y/z"]


def test_resumable_upload_and_compose(bucket: storage.Bucket) -> None:
    data = bytes(range(256)) * 4096
    big = bucket.blob("big", chunk_size=256 * 1024)
    with big.open("wb") as stream:
        stream.write(data)
    assert big.download_as_bytes() == data
    bucket.blob("two").compose([big, big])
    assert bucket.blob("two").download_as_bytes() == data + data
