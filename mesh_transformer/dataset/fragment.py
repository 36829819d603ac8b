"""The first task: a part of the input becomes a fragment, one object with the tokens of its documents.

After the result stand the table of the documents (`ROW` of counts.py), the tokens of the training documents and the
tokens of the validation documents. The table has the training documents first; each side is in input order. Examples of
instruction data are documents too. The highest bit of a token then says whether it is learned.
"""

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Literal

import numpy as np

from mesh_transformer.data.tokens.fast_encoder import LiteralEncoder
from mesh_transformer.data.tokens.tokenizer import Tokenizer, load_tokenizer
from mesh_transformer.dataset.counts import ROW, DocumentCounts
from mesh_transformer.dataset.objects import spool, write_object
from mesh_transformer.dataset.parts import Bad, FilePart, pieces
from mesh_transformer.errors import UserError

SIDES = ("train", "val")
# the bit of a token of four bytes that is learned
LEARNED = 1 << 31
EMPTY, NULL, NOT_TAKEN = "empty", "null", "not in the share"
# texts are tokenized in batches of so many characters
_BATCH_CHARS = 1 << 18
# a document of more tokens than this waits in a file until its end
_OPEN_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20
_BLOCK_ROWS = _BLOCK_BYTES // ROW.itemsize
_ROW = struct.Struct("<16sQQ")
# messages that a fragment keeps, and reasons that it counts apart
_MESSAGES, _MESSAGE_CHARS, _REASONS = 5, 400, 30


@dataclass(frozen=True)
class Examples:
    """How examples of instruction data become documents.

    Args:
        most: tokens of a document.
        long: whether an example with more tokens is cut at the end, or dropped.
        template: the fingerprint of the tokenizer's chat templates.
    """

    most: int
    long: Literal["cut", "drop"]
    template: str


@dataclass(frozen=True)
class Text:
    """How text becomes tokens.

    Args:
        tokenizer: as `load_tokenizer` takes it.
        fingerprint: of this tokenizer.
        column: the name of the text in rows and JSON objects.
        val: the share of the documents that go to the validation set.
        on_error: whether a place that is not a document is counted or ends the job.
        examples: how examples of instruction data become documents. None: each row or JSON object has a text.
    """

    tokenizer: str
    fingerprint: str
    column: str = "text"
    val: float = 0.001
    on_error: Literal["skip", "stop"] = "stop"
    examples: Examples | None = None

    @property
    def width(self) -> int:
        """Bytes of a token in a fragment."""
        return 2 if tokenizer_of(self).n_vocab <= 1 << 16 and self.examples is None else 4


@dataclass(frozen=True)
class Fragment:
    """What a fragment holds.

    Args:
        train, val: the counts of its documents.
        dropped: how many documents were dropped, by reason. Duplicates are dropped later.
        bad: messages about the first places that are not documents.
        width: bytes of a token.
        cut: how many examples were too long, and were cut.
        at: where the table begins in the object.
    """

    train: DocumentCounts
    val: DocumentCounts
    dropped: dict[str, int]
    bad: tuple[str, ...]
    width: int
    cut: int = 0
    at: int = 0

    @property
    def sides(self) -> tuple[DocumentCounts, DocumentCounts]:
        return self.train, self.val

    @property
    def documents(self) -> int:
        return self.train.documents + self.val.documents

    @property
    def tables_at(self) -> tuple[int, int]:
        """Where the rows of each side begin in the object."""
        return self.at, self.at + self.train.documents * ROW.itemsize

    @property
    def tokens_at(self) -> tuple[int, int]:
        """Where the tokens of each side begin in the object."""
        first = self.at + self.documents * ROW.itemsize
        return first, first + self.train.tokens * self.width


@functools.lru_cache(maxsize=1)
def tokenizer_of(text: Text) -> Tokenizer:
    """The tokenizer of a job, on any node.

    Raises:
        UserError: it gives other tokens than the tokenizer on the driver's node.
    """
    # a task takes one core
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(text.tokenizer)
    if tokenizer.fingerprint != text.fingerprint:
        raise UserError(
            f"the tokenizer {text.tokenizer} has other files here, on {platform.node()}, than where "
            "prepare_dataset.py runs: give a folder that all nodes share, or a name on the hub with its revision"
        )
    return tokenizer


@functools.lru_cache(maxsize=1)
def _encoder_of(text: Text) -> LiteralEncoder:
    """The encoder of a job in this process: its proof that a faster library gives the same ids holds for all parts."""
    return LiteralEncoder(tokenizer_of(text), threads=1)


def write_fragment(target: str, scratch: str, part: FilePart, share: float, text: Text) -> Fragment:
    """Tokenize a part into the object `target`.

    Args:
        share: of the documents of this input that are taken.

    Raises:
        UserError: a place is not a document, and `text.on_error` is "stop"; or the input is missing or damaged.
    """
    with contextlib.ExitStack() as stack:
        collected = Collected(stack, scratch, share, text)
        writer = _Writer(stack, scratch, collected, text)
        for item in pieces(part, text.column):
            if isinstance(item, Bad):
                writer.drop_open(item)
            else:
                writer.add(item.text, item.ends, item.null)
        writer.flush()
        return collected.write(target)


@dataclass
class _Document:
    """A document whose pieces still arrive, or wait for their tokens."""

    hash: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    bytes: int = 0
    dropped: bool = False


@dataclass
class _Side:
    """The tables and tokens of the training documents or of the validation documents, in files."""

    table: IO[bytes]
    tokens: IO[bytes]

    def counts(self) -> DocumentCounts:
        return sum((DocumentCounts.of(np.frombuffer(rows, ROW)) for rows in _blocks(self.table)), DocumentCounts())


class Collected:
    """The kept documents of a part, in files, and the counts of the dropped ones.

    Args:
        stack: closes the files.
        share: of the documents that are taken.
    """

    def __init__(self, stack: contextlib.ExitStack, scratch: str, share: float, text: Text):
        self._scratch, self._share, self._text = scratch, share, text
        self._sides = [_Side(*(stack.enter_context(spool(scratch)) for _ in range(2))) for _ in SIDES]
        self._dropped: dict[str, int] = {}
        self._bad: list[str] = []
        self.cut = 0

    def takes(self, digest: bytes) -> bool:
        """Whether a document with this hash is in the share; counts it if it is not."""
        if fraction(digest, b"share") < self._share:
            return True
        self.drop(NOT_TAKEN)
        return False

    def add(self, digest: bytes, tokens: IO[bytes], count: int, size: int) -> None:
        """Add a document.

        Args:
            tokens: a file at their beginning.
            count: of the tokens.
            size: of the text, bytes.
        """
        side = self._sides[fraction(digest, b"val") < self._text.val]
        shutil.copyfileobj(tokens, side.tokens, _BLOCK_BYTES)
        side.table.write(_ROW.pack(digest, count, size))

    def drop(self, reason: str) -> None:
        """Count a document that is dropped."""
        known = reason in self._dropped or len(self._dropped) < _REASONS
        name = reason if known else "other reasons"
        self._dropped[name] = self._dropped.get(name, 0) + 1

    def refuse(self, bad: Bad) -> None:
        """Count a place that is not a document.

        Raises:
            UserError: such a place ends the job.
        """
        if self._text.on_error == "stop":
            raise UserError(bad.message)
        self.drop(bad.kind)
        if len(self._bad) < _MESSAGES:
            self._bad.append(bad.message[:_MESSAGE_CHARS])

    def write(self, target: str) -> Fragment:
        """Write the fragment."""
        train, val = (side.counts() for side in self._sides)
        fragment = Fragment(
            train, val, dict(sorted(self._dropped.items())), tuple(self._bad), self._text.width, self.cut
        )
        files = [*(side.table for side in self._sides), *(side.tokens for side in self._sides)]
        return write_object(target, self._scratch, fragment, (block for file in files for block in _blocks(file)))


class _Writer:
    """Tokenizes the documents of a part. Memory holds one batch of text, whatever the length of the documents."""

    def __init__(self, stack: contextlib.ExitStack, scratch: str, collected: Collected, text: Text):
        self._collected, self._tokenizer = collected, tokenizer_of(text)
        self._encode = _encoder_of(text).encode
        self._dtype = np.dtype(f"<u{text.width}")
        # tokens of the open document
        self._open = stack.enter_context(spool(scratch, _OPEN_BYTES))
        self._owner: _Document | None = None
        # the document whose pieces arrive
        self._document = _Document()
        self._batch: list[tuple[_Document, str, bool]] = []
        self._chars = 0

    def add(self, text: str, ends: bool, null: bool) -> None:
        """The next piece of the open document."""
        document = self._document
        # JSON may hold halves of surrogate pairs
        data = text.encode("utf-8", "surrogatepass")
        document.hash.update(data)
        document.bytes += len(data)
        if ends:
            self._document = _Document()
            if null or not document.bytes:
                self._collected.drop(NULL if null else EMPTY)
                document.dropped = True
            elif not self._collected.takes(document.hash.digest()):
                document.dropped = True
            if document.dropped:
                return
        self._batch.append((document, text, ends))
        self._chars += len(text) + 64
        if self._chars >= _BATCH_CHARS:
            self.flush()

    def drop_open(self, bad: Bad) -> None:
        """Count a place that is not a document, and drop the document that is open there."""
        self._collected.refuse(bad)
        self._document.dropped = True
        self._document = _Document()

    def flush(self) -> None:
        """Tokenize the batch."""
        batch = [entry for entry in self._batch if not entry[0].dropped]
        self._batch, self._chars = [], 0
        for (document, _, ends), ids in zip(batch, self._encode([text for _, text, _ in batch]), strict=True):
            if document is not self._owner:
                self._restart(document)
            self._open.write(np.array(ids, self._dtype).tobytes())
            if ends:
                self._close(document)

    def _restart(self, owner: _Document | None) -> None:
        self._owner = owner
        self._open.seek(0)
        self._open.truncate()

    def _close(self, document: _Document) -> None:
        count = self._open.tell() // self._dtype.itemsize
        if not count:
            self._collected.drop(EMPTY)
            return
        self._open.write(np.array(self._tokenizer.eot, self._dtype).tobytes())
        self._open.seek(0)
        self._collected.add(document.hash.digest(), self._open, count + 1, document.bytes)
        self._restart(None)


def fraction(digest: bytes, key: bytes) -> float:
    """A number in [0, 1) that depends on the hash of a document and on a key only."""
    # 53 bits, so that no rounding gives 1
    return (int.from_bytes(hashlib.blake2b(digest, key=key, digest_size=8).digest(), "big") >> 11) / 2**53


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    """The content of a file from its beginning, in blocks of whole rows."""
    file.seek(0)
    while block := file.read(_BLOCK_ROWS * ROW.itemsize):
        yield block
