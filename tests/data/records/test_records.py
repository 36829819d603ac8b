"""Record files: TensorFlow's bytes, and damage that is refused."""

import contextlib
import gzip
import io
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loading import read_records

from mesh_transformer.data.records import tfrecords as records
from mesh_transformer.data.records.example import MAX_NUMBERS, decode_example, encode_example
from mesh_transformer.data.records.inflate import detect, inflated
from mesh_transformer.data.records.tfrecords import (
    RecordReader,
    masked_crc32c,
    write_record,
    write_records,
)
from mesh_transformer.errors import UserError
from mesh_transformer.sequences import document_numbers, learned_tokens

ROWS = [np.arange(k, k + 9) * 1000 for k in range(4)]


def written(rows: list[np.ndarray] = ROWS) -> bytes:
    file = io.BytesIO()
    for row in rows:
        write_record(file, row)
    return file.getvalue()


def read_all(path: Path) -> list[list[int]]:
    return [row.tolist() for row in read_records(str(path))]


@pytest.mark.parametrize("name", ["full_6", "tiny_40", "tinyb_7"])
def test_golden_records_both_ways(golden, name):
    tokens = np.load(golden / f"{name}.npz")["tokens"]
    np.testing.assert_array_equal(np.stack(list(read_records(str(golden / f"{name}.tfrecords")))), tokens)
    assert written(list(tokens)) == (golden / f"{name}.tfrecords").read_bytes()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40))
def test_example_round_trip(tokens):
    decoded = decode_example(encode_example(np.array(tokens, np.int64))).tokens
    assert decoded.dtype == np.int32
    assert decoded.tolist() == tokens


def field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of the wire format, and where the next byte is."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def fields_of(data: bytes) -> list[tuple[int, bytes]]:
    """The fields of a message whose fields all have a length."""
    at, found = 0, []
    while at < len(data):
        tag, at = varint(data, at)
        assert tag & 7 == 2
        length, at = varint(data, at)
        found.append((tag >> 3, data[at : at + length]))
        at += length
    return found


def text_of_2021(data: bytes) -> list[int]:
    """What the loader of 2021 asks of an Example: the feature `text` of int64, and no other."""
    features = {}
    for _, entry in fields_of(fields_of(data)[0][1]):
        (_, key), (_, value) = fields_of(entry)
        features[key] = value
    (kind, numbers), tokens, at = fields_of(features[b"text"])[0], [], 0
    assert kind == 3
    packed = fields_of(numbers)[0][1]
    while at < len(packed):
        token, at = varint(packed, at)
        tokens.append(token)
    return tokens


def test_a_reader_of_2021_ignores_documents_and_loss():
    row = np.array([50256, 0, 127, 128, 2**31 - 1, 5, 6])
    for documents, loss in [(None, None), ([3, 2], None), ([3, 2], [0, 2, 1, 2]), (None, [7])]:
        data = encode_example(row, *(None if one is None else np.array(one) for one in (documents, loss)))
        assert text_of_2021(data) == row.tolist()


def test_unpacked_numbers_and_other_features():
    unpacked = field(3, bytes([1 << 3, 7, 1 << 3, 0x80, 1]))
    other = field(1, field(1, b"meta") + field(2, field(1, field(1, b"x"))))
    example = field(1, other + field(1, field(1, b"text") + field(2, unpacked)))
    assert decode_example(example).tokens.tolist() == [7, 128]


def test_example_without_text():
    with pytest.raises(UserError, match="no feature `text` .*texu"):
        decode_example(encode_example(np.arange(3)).replace(b"text", b"texu"))


@pytest.mark.parametrize(("kind", "number"), [("bytes", 1), ("floats", 2)])
def test_text_that_is_no_tokens(tmp_path, monkeypatch, kind, number):
    feature = field(number, field(1, b"abcd"))  # a list of one text, or of one float32
    example = field(1, field(1, field(1, b"text") + field(2, feature)))
    monkeypatch.setattr(records, "encode_example", lambda *_: example)
    path = tmp_path / "x.tfrecords"
    write_records(str(path), [np.arange(4)])
    with pytest.raises(UserError, match=rf"x\.tfrecords: record 0 at byte 0: .* holds {kind}; .* int64"):
        read_all(path)


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_refused(data):
    with contextlib.suppress(UserError):
        assert decode_example(data).tokens.dtype == np.int32


@settings(max_examples=200)
@given(st.data())
def test_mutated_examples_decode_or_are_refused(data):
    """What decodes has a document and a loss mask for each token."""
    raw = bytearray(encode_example(ROWS[2], np.array([3, 4]), np.array([1, 2, 1, 3])))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UserError):
        example = decode_example(bytes(raw))
        assert example.tokens.dtype == np.int32
        assert document_numbers(example).shape == learned_tokens(example).shape == example.tokens.shape


@settings(max_examples=150)
@given(at=st.integers(0, 10_000), value=st.integers(1, 255), kind=st.sampled_from(["plain", "gzip", "zlib"]))
def test_a_changed_byte_is_refused_or_harmless(tmp_path_factory, at, value, kind):
    pack = {"plain": bytes, "gzip": lambda d: gzip.compress(d, mtime=0), "zlib": zlib.compress}[kind]
    raw = bytearray(pack(written()))
    raw[at % len(raw)] ^= value
    path = tmp_path_factory.mktemp("mutated") / "x.tfrecords"
    path.write_bytes(raw)
    with contextlib.suppress(UserError):
        assert read_all(path) == [row.tolist() for row in ROWS]


@pytest.mark.parametrize("kind", ["plain", "gzip", "zlib"])
def test_every_cut_is_noticed(tmp_path, kind):
    pack = {"plain": bytes, "gzip": gzip.compress, "zlib": zlib.compress}[kind]
    raw, path = pack(written()), tmp_path / "x.tfrecords"
    boundaries = {0} | {len(written(ROWS[:k])) for k in range(5)} if kind == "plain" else {0, len(raw)}
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        if size in boundaries:
            assert read_all(path) == [row.tolist() for row in ROWS[: len(read_all(path))]]
        else:
            with pytest.raises(UserError, match="record|damaged"):
                read_all(path)


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_an_offset_past_the_end_closes_the_file(tmp_path, monkeypatch, compress):
    path = tmp_path / "x.tfrecords"
    path.write_bytes(compress(written()))
    file = path.open("rb")
    monkeypatch.setattr(records, "open_binary", lambda _: file)
    with pytest.raises(UserError, match=r"x\.tfrecords: record 9 at byte 100000: ") as error:
        RecordReader(str(path), 9, 100_000)
    # the traceback in `error` refers to the reader, so the garbage collector does not close the file
    assert file.closed, error


def test_the_error_names_file_record_and_offset(tmp_path):
    path = tmp_path / "x.tfrecords"
    path.write_bytes(written()[:-5])
    offset = len(written(ROWS[:3]))
    with pytest.raises(UserError, match=rf"x\.tfrecords: record 3 at byte {offset}: .*ends inside"):
        read_all(path)


@pytest.mark.parametrize("pack", [bytes, zlib.compress])
def test_a_huge_length_allocates_nothing(tmp_path, pack, monkeypatch):
    length = struct.pack("<Q", 1 << 62)
    path = tmp_path / "x.tfrecords"
    path.write_bytes(pack(length + struct.pack("<I", masked_crc32c(length)) + b"abc"))
    monkeypatch.setattr(RecordReader, "_exactly", lambda *_: pytest.fail("reads the data"))
    with pytest.raises(UserError, match="record 0 at byte 0: it claims 4611686018427387904 bytes, at most"):
        read_all(path)


def test_a_plain_file_that_looks_compressed(tmp_path):
    """The first bytes of a length may be those of zlib: the header's checksum decides."""
    path = tmp_path / "x.tfrecords"
    row = np.ones(0x178, np.int64)
    while len(encode_example(row)) > 0x178:
        row = row[1:]
    write_records(str(path), [row])
    assert detect(path.read_bytes()[:12]) == "zlib"
    assert read_all(path) == [row.tolist()]


def test_an_expanding_zst_file_fills_no_memory():
    bomb = zstandard.compress(bytes(1 << 28), 19)
    tracemalloc.start()
    with inflated(io.BytesIO(bomb), "zst", "bomb.zst") as stream:
        assert stream.read(1 << 16) == bytes(1 << 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80 << 20


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, zlib.compress, lambda d: gzip.compress(d[:100]) + gzip.compress(d[100:])]
)
def test_going_on_from_any_record(tmp_path, pack):
    path = tmp_path / "x.tfrecords"
    path.write_bytes(pack(written()))
    for k in range(5):
        with RecordReader(str(path)) as reader:
            for _ in range(k):
                assert reader.read(keep=False) is not None
            place = reader.number, reader.offset
        assert place == (k, len(written(ROWS[:k])))
        with RecordReader(str(path), *place) as reader:
            rest = []
            while (record := reader.read()) is not None:
                rest.append(record.example().tokens.tolist())
        assert rest == [row.tolist() for row in ROWS[k:]]


def test_passing_over_notices_the_end(tmp_path):
    path = tmp_path / "x.tfrecords"
    path.write_bytes(written()[:-2])
    with (
        RecordReader(str(path), 3, len(written(ROWS[:3]))) as reader,
        pytest.raises(UserError, match="ends inside"),
    ):
        reader.read(keep=False)


def test_a_compressed_bomb_is_read_in_bounded_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    length = struct.pack("<Q", 2000)
    path = tmp_path / "x.tfrecords"
    path.write_bytes(zlib.compress(length + struct.pack("<I", masked_crc32c(length)) + bytes(1 << 24)))
    with pytest.raises(UserError, match="at most 1000"):
        read_all(path)


def test_missing_and_folder(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match=str(path)):
            read_all(path)


def test_a_compressed_file_that_is_cut_short_names_the_record(tmp_path):
    rng = np.random.default_rng(0)
    plain = tmp_path / "plain.tfrecords"
    write_records(str(plain), [rng.integers(0, 50000, 50) for _ in range(40)])
    cut = tmp_path / "cut.tfrecords"
    cut.write_bytes(gzip.compress(plain.read_bytes())[:-1000])
    with pytest.raises(UserError, match=r"cut.tfrecords.*record \d+ at byte \d+"):
        list(read_records(str(cut)))


def test_numbers_are_counted_before_they_are_made():
    """A record of 64 MiB would become 1 GB of objects."""
    numbers, more, most = np.zeros(MAX_NUMBERS - 30, np.int64), np.ones(10, np.int64), np.ones(40, np.int64)
    assert len(decode_example(encode_example(numbers, more, more)).tokens) == len(numbers)
    for rest in [(most, None), (more, most), (None, 300 * most)]:
        with pytest.raises(
            UserError, match=r"^the record has some 1,048,\d\d\d numbers, at most 1,048,576 are allowed"
        ):
            decode_example(encode_example(numbers, *rest))
    assert len(decode_example(encode_example(numbers, most), MAX_NUMBERS + 30).tokens) == len(numbers)


def test_features_are_counted_before_they_are_made():
    text = field(1, field(1, field(1, b"text") + field(2, field(3, field(1, b"\7")))))
    # each a part of the field `features`, which a message joins
    others = [field(1, field(1, field(1, b"%06d" % number))) for number in range(1000)]
    assert decode_example(b"".join([*others[1:], text])).tokens.tolist() == [7]
    with pytest.raises(UserError, match="^the record has 1,001 features, at most 1,000 are allowed"):
        decode_example(b"".join([*others, text]))
