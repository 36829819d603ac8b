"""Archives are read in blocks of any size. The contents of .npz and .bin files have tests of their own."""

import itertools
import zipfile

import pytest

from mesh_transformer.checkpoint import archive
from mesh_transformer.checkpoint.archive import DamagedArchive


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_blocks_joined_are_the_whole_member(tmp_path, monkeypatch, kind):
    content = bytes(5000) + b"abc" * 700 + bytes(range(256))
    with zipfile.ZipFile(tmp_path / "x.zip", "w", kind) as made:
        made.writestr("folder/one", content)
        made.writestr("two", b"")
    one, two = archive.entries(str(tmp_path / "x.zip"))
    assert (one.name, one.n_bytes, two.name, two.n_bytes) == ("folder/one", len(content), "two", 0)
    for deflated_bytes in (1, 2, 50, 1 << 16):
        monkeypatch.setattr(archive, "DEFLATED_BYTES", deflated_bytes)
        for limit in (1, 7, 300, len(content), 1 << 20):
            found = list(archive.read_blocks(one, limit))
            assert b"".join(found) == content
            assert max(map(len, found)) <= limit
            assert min(map(len, found)) > 0
    assert list(archive.read_blocks(two, 10)) == []


def test_an_unknown_compression_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_BZIP2) as made:
        made.writestr("one", b"1")
    with pytest.raises(DamagedArchive, match="unknown compression 12"):
        archive.entries(str(tmp_path / "x.zip"))


def test_an_encrypted_member_is_refused(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("one", b"1")
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(DamagedArchive, match="'one': encrypted"):
        archive.entries(str(path))


@pytest.mark.parametrize("name", ["one", "Gewichte \N{LATIN SMALL LETTER U WITH DIAERESIS}"])
def test_a_header_of_wrong_length_is_refused(tmp_path, name):
    """With a wrong length the data would start elsewhere, and no reader compares the CRC of a torch storage."""
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as made, made.open(name, "w", force_zip64=True) as member:
        member.write(bytes(range(100)))
    content = path.read_bytes()
    (entry,) = archive.entries(str(path))
    assert content[entry.start : entry.start + 100] == bytes(range(100))
    for at, change in itertools.product(range(26, 30), (1, 2, 4, 8, 16, 32, 64, 128, 255)):
        path.write_bytes(content[:at] + bytes([content[at] ^ change]) + content[at + 1 :])
        with pytest.raises(DamagedArchive, match="the length of its header"):
            archive.entries(str(path))
