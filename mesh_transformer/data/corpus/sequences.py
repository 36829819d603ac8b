"""Makes record files from text: tokenizes documents, shuffles and joins them, and cuts sequences of equal length.

The tokens lie in a temporary file. Memory holds a few numbers for each document and sequence.
"""

import contextlib
import hashlib
import logging
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np

from mesh_transformer import cache_folders
from mesh_transformer.data.corpus.options import SequenceOptions
from mesh_transformer.data.corpus.pieces import TextPiece, file_pieces
from mesh_transformer.data.records.text_counts import TextCounts, cached_counts, utf8_bytes
from mesh_transformer.data.records.tfrecords import write_records
from mesh_transformer.data.tokens.cleaning import make_cleaner
from mesh_transformer.data.tokens.fast_encoder import LiteralEncoder
from mesh_transformer.data.tokens.tokenizer import EOT_TEXT, Tokenizer, load_tokenizer, warn_of_more_ids
from mesh_transformer.errors import UserError, plural
from mesh_transformer.files import check_credentials, check_writable, is_remote, join, open_binary, scratch_file, upload
from mesh_transformer.logs import Progress

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_BATCH_CHARS = 1 << 18
_BUFFER_BYTES = 1 << 20
# change it when the same text gives other records
_CACHE_FORMAT = "1"


@dataclass(frozen=True)
class Written:
    """What `prepare` wrote.

    Args:
        tokens: of the sequences.
        source: the size of the text.
        null_lines: skipped JSON lines with null for their text.
    """

    path: str
    sequences: int
    tokens: int
    source: TextCounts
    null_lines: int


def prepare(files: list[str], name: str, output_dir: str, tokenizer: Tokenizer, options: SequenceOptions) -> Written:
    """Write `{name}_{sequences}.tfrecords` into `output_dir` from `files` (see `input_files`).

    Raises:
        UserError: bad input, an output folder that is not writable, or less text than one sequence. Nothing is left
            behind.
    """
    if not name or os.path.basename(name) != name:
        raise UserError(f"the output's name {name!r} is not a plain file name: choose the folder with --output-dir")
    remote = is_remote(output_dir)
    if remote:
        check_credentials()
    else:
        check_writable(output_dir)
        os.makedirs(output_dir, exist_ok=True)
    with scratch_file("." if remote else output_dir) as scratch:
        written = write_corpus(files, scratch, tokenizer, options)
        path = join(output_dir, f"{name}_{written.sequences}.tfrecords")
        (upload if remote else os.replace)(scratch, path)
    return replace(written, path=path)


def cached_records(path: str, seq: int, tokenizer: str | None, n_vocab: int | None = None) -> str:
    """The record file of a text file, from the user's cache folder: sequences of seq + 1 tokens in the text's order.

    `counts_of_cached` has the size of the text.

    Several processes may call it at once. Each writes under its own name; the last one to finish replaces the earlier
    files.

    Args:
        n_vocab: of the model. A warning names a tokenizer with more IDs. None: no warning.

    Raises:
        UserError: the text is not UTF-8 or shorter than one sequence, or there is no such tokenizer.
    """
    tokens = load_tokenizer(tokenizer)
    if n_vocab is not None:
        warn_of_more_ids(tokens, n_vocab)
    folder = cache_folders.open_data_sets()
    target = os.path.join(folder, _cached_name(path, seq, tokens.fingerprint))
    if not os.path.isfile(target):
        _log.info("tokenizing %s: the tokens stay in %s", path, folder)
        with scratch_file(folder) as scratch, scratch_file(folder) as counts:
            written = write_corpus(
                [path], scratch, tokens, SequenceOptions(seq=seq, preserve_data_order=True), "data.seq"
            )
            with open(counts, "w", encoding="ascii") as file:
                file.write(written.source.to_json())
            os.replace(counts, cached_counts(target))
            os.replace(scratch, target)
    return target


def _cached_name(path: str, seq: int, fingerprint: str) -> str:
    prefix = hashlib.sha256(f"{_CACHE_FORMAT} {seq} {fingerprint}\n".encode())
    with open_binary(path) as file:
        key = hashlib.file_digest(file, prefix.copy).hexdigest()[:32]  # type: ignore[arg-type]
    stem = os.path.splitext(os.path.basename(path))[0]
    return f"{stem}-{key}.tfrecords"


def write_corpus(
    files: list[str], path: str, tokenizer: Tokenizer, options: SequenceOptions, seq_option: str = "--seq"
) -> Written:
    """Write the sequences of `files` to the local `path`.

    Args:
        seq_option: what the user sets to choose `options.seq`, for a message.

    Raises:
        UserError: bad input, or less text than one sequence.
    """
    with TokenStore(os.path.dirname(path) or ".", tokenizer.n_vocab) as store:
        null_lines = _tokenize(files, store, tokenizer, options)
        length = options.seq + 1
        if store.n_tokens * options.n_repack_epochs < length:
            raise UserError(
                f"{files[0]}{' and others' if len(files) > 1 else ''}: {plural(store.n_tokens, 'token')} do not fill "
                f"one sequence of {length:,} ({plural(store.n_documents, 'document')}): add text or choose a shorter "
                f"{seq_option}"
            )
        total = store.n_tokens * options.n_repack_epochs // length
        count = write_records(path, _tracked(sequences(store, options), "sequences", total))
        if not count:
            raise UserError(
                f"none of {total} sequences has {options.min_unique_tokens} distinct tokens: lower --min-unique-tokens"
            )
        source = TextCounts(store.n_documents, store.n_tokens, store.text_bytes)
        return Written(path, count, count * length, source, null_lines)


class TokenStore:
    """Documents one after the other on disk. Memory holds 8 bytes for each document.

    `text_bytes` counts the bytes of their text.
    """

    def __init__(self, folder: str | None, n_vocab: int):
        self._file = tempfile.TemporaryFile(buffering=_BUFFER_BYTES, dir=folder)  # noqa: SIM115  (closed by __exit__)
        self._dtype = np.dtype(np.uint16 if n_vocab <= 1 << 16 else np.uint32)
        self._ends = array("q")
        self._n_tokens = 0
        self.text_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the current document."""
        self._file.write(np.asarray(tokens, self._dtype).tobytes())
        self._n_tokens += len(tokens)

    def end_document(self, eot: int) -> None:
        """End the current document with `eot`. A document without tokens is skipped."""
        if self._n_tokens > self.n_tokens:
            self.add([eot])
            self._ends.append(self._n_tokens)

    @property
    def n_documents(self) -> int:
        return len(self._ends)

    @property
    def n_tokens(self) -> int:
        """Tokens of the ended documents."""
        return self._ends[-1] if self._ends else 0

    def ends(self) -> np.ndarray:
        """Where each document ends, in tokens from the beginning, int64 (n_documents,)."""
        return np.array(self._ends, np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop in the order of `add`, int32."""
        self._file.flush()
        size = self._dtype.itemsize
        descriptor = self._file.fileno()
        # not by pread, which Windows does not have; the next `add` continues at the end
        os.lseek(descriptor, start * size, os.SEEK_SET)
        data = os.read(descriptor, (stop - start) * size)
        os.lseek(descriptor, 0, os.SEEK_END)
        return np.frombuffer(data, self._dtype).astype(np.int32)


class JoinedDocuments:
    """The `carried` tokens, then all documents of a store in the given order, as one stream of int32."""

    def __init__(self, store: TokenStore, order: np.ndarray | None, carried: np.ndarray):
        self._store, self._carried = store, carried
        ends = store.ends()
        starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
        chosen = slice(None) if order is None else order
        self._starts, self._ends = starts[chosen], np.cumsum((ends - starts)[chosen])

    def __len__(self) -> int:
        return len(self._carried) + (int(self._ends[-1]) if len(self._ends) else 0)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop of the stream, int32."""
        parts = [self._carried[start:stop]]
        at, stop = max(0, start - len(self._carried)), stop - len(self._carried)
        document = int(np.searchsorted(self._ends, at, "right"))
        while at < stop:
            end = int(self._ends[document])
            before = int(self._ends[document - 1]) if document else 0
            first = int(self._starts[document]) + at - before
            taken = min(end, stop) - at
            parts.append(self._store.read(first, first + taken))
            at += taken
            document += 1
        return np.concatenate(parts)


def sequences(store: TokenStore, options: SequenceOptions) -> Iterator[np.ndarray]:
    """The full sequences of all passes, int32 (seq + 1,). The rest of a pass starts the next pass."""
    rng = np.random.default_rng(options.seed)
    length = options.seq + 1
    carried = np.empty(0, np.int32)
    for _ in range(options.n_repack_epochs):
        keep = options.preserve_data_order
        stream = JoinedDocuments(store, None if keep else rng.permutation(store.n_documents), carried)
        n_full = len(stream) // length
        for i in range(n_full) if keep else rng.permutation(n_full):
            tokens = stream.read(int(i) * length, (int(i) + 1) * length)
            if options.min_unique_tokens and len(np.unique(tokens)) < options.min_unique_tokens:
                _log.debug("dropped a sequence with too few distinct tokens: %s ...", tokens[:16].tolist())
                continue
            yield tokens
        carried = stream.read(n_full * length, len(stream))
    _log.debug("the last %d tokens fill no sequence and are dropped", len(carried))


def _tokenize(files: list[str], store: TokenStore, tokenizer: Tokenizer, options: SequenceOptions) -> int:
    """Add the documents to `store`. Returns the number of JSON lines with null for their text."""
    null_lines = 0
    clean = make_cleaner(options.normalize_with_ftfy, options.normalize_with_wikitext_detokenize)
    separator = None if options.treat_eot_as_text else EOT_TEXT
    encoder = LiteralEncoder(tokenizer)
    for batch in _batches(_tracked(_all_pieces(files, separator), "pieces of text")):
        texts = [clean(piece.text) for piece in batch]
        store.text_bytes += sum(map(utf8_bytes, texts))
        for piece, tokens in zip(batch, encoder.encode(texts), strict=True):
            store.add(tokens)
            null_lines += piece.null
            if piece.ends:
                store.end_document(tokenizer.eot)
    return null_lines


def _all_pieces(files: list[str], separator: str | None) -> Iterator[TextPiece]:
    for file in files:
        _log.debug("reading %s", file)
        yield from file_pieces(file, separator)


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text) + 64
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _tracked(items: Iterable[_T], what: str, total: int | None = None) -> Iterator[_T]:
    """Pass `items` through and show how many have passed."""
    with contextlib.closing(Progress(what, total, unit=what, leave=False)) as progress:
        for count, item in enumerate(items, 1):
            yield item
            progress.update(count)
