"""Encodes a corpus with the ids of a tokenizer, by a faster library where that is proven to give the same ids."""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mesh_transformer.data.tokens import byte_level
from mesh_transformer.data.tokens.probe import probe_texts
from mesh_transformer.data.tokens.tiktoken_encoder import TiktokenEncoder
from mesh_transformer.data.tokens.tokenizer import HubTokenizer, Tokenizer, valid_text

_log = logging.getLogger(__name__)

# tiktoken starts in about the time that the tokenizer takes for this text
_BEFORE_CHARS = 1 << 21
# the characters that both libraries encode, to compare their ids
_COMPARED_CHARS = 1 << 20
_NAMES = 300
_SHOWN_CHARS = 60


class LiteralEncoder:
    """Encodes texts as `tokenizer.encode_literal` does: the ids are the same, whether or not tiktoken is installed.

    The tokenizer encodes the first two million characters. Then tiktoken takes over if it can read the vocabulary,
    divides all characters into the same classes, and gives the same ids for the texts of `probe_texts` and the next
    million characters. On a difference a warning names the text, and the tokenizer goes on.

    Args:
        threads: how many encode at once. None: one for each core, or one if TOKENIZERS_PARALLELISM is false.
    """

    def __init__(self, tokenizer: Tokenizer, threads: int | None = None):
        self._tokenizer = tokenizer
        self._threads = _threads() if threads is None else threads
        self._fast: TiktokenEncoder | None = None
        # the tokenizer whose vocabulary tiktoken has not read yet
        self._source = tokenizer if isinstance(tokenizer, HubTokenizer) else None
        # characters since the start, and since tiktoken encodes
        self._chars = self._compared = 0
        self._pool: ThreadPoolExecutor | None = None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text. Names of special tokens are ordinary characters."""
        if self._fast is None:
            self._start(texts)
        if self._fast is None:
            return self._tokenizer.encode_literal(texts)
        valid = [valid_text(text) for text in texts]
        encoded = self._encode_all(self._fast, valid)
        if encoded is None or self._compared < _COMPARED_CHARS:
            self._compared += sum(map(len, texts))
            expected = self._tokenizer.encode_literal(texts)
            self._compare(valid, encoded, expected)
            return expected
        left = [i for i, ids in enumerate(encoded) if ids is None]
        others = iter(self._tokenizer.encode_literal([valid[i] for i in left]) if left else [])
        return [next(others) if ids is None else ids for ids in encoded]

    @property
    def fast(self) -> bool:
        """Whether tiktoken encodes the next texts."""
        return self._fast is not None

    def _start(self, texts: Sequence[str]) -> None:
        """Prepare tiktoken once enough text has come."""
        self._chars += sum(map(len, texts))
        if self._source is None or self._chars < _BEFORE_CHARS:
            return
        source, self._source = self._source, None
        try:
            definition = source.definition()
            fast = TiktokenEncoder(byte_level.read(definition, source.merged))
        except byte_level.Unsupported as error:
            _log.debug("tokenizers encodes all texts, not tiktoken: %s", error)
            return
        except ImportError:
            _log.info("tokenizers encodes the texts; tiktoken is some five times as fast: pip install tiktoken")
            return
        names = [entry["content"] for entry in definition.get("added_tokens", [])][:_NAMES]
        probe = probe_texts(names)
        self._fast = fast
        self._compare(probe, self._encode_all(fast, probe), self._tokenizer.encode_literal(probe))
        if self._fast is not None:
            _log.info("tiktoken encodes the texts: it gave the ids of tokenizers for %d odd texts", len(probe))

    def _encode_all(self, fast: TiktokenEncoder, texts: Sequence[str]) -> list[list[int] | None] | None:
        """The ids of each text, or None for a text that `fast` refuses. Returns None if the library panics."""
        try:
            if self._threads == 1 or len(texts) < 2:
                return [fast.encode(text) for text in texts]
            self._pool = self._pool or ThreadPoolExecutor(self._threads, "encode")
            share = -(-len(texts) // (4 * self._threads))
            groups = [texts[at : at + share] for at in range(0, len(texts), share)]
            done = self._pool.map(lambda group: [fast.encode(text) for text in group], groups)
            return [ids for group in done for ids in group]
        except BaseException as error:
            # the class of the panics of Rust cannot be imported
            if type(error).__name__ != "PanicException":
                raise
            return None

    def _compare(
        self, texts: Sequence[str], encoded: Sequence[list[int] | None] | None, expected: Sequence[list[int]]
    ) -> None:
        """Stop using tiktoken, with a warning, if it failed or its ids differ."""
        if encoded is None:
            self._fast = None
            _log.warning("tiktoken failed on one of %d texts: tokenizers encodes them and all later texts", len(texts))
            return
        for text, theirs, ours in zip(texts, encoded, expected, strict=True):
            if theirs is None or theirs == ours:
                continue
            at = os.path.commonprefix([theirs, ours])
            self._fast = None
            _log.warning(
                "tiktoken gives other ids than tokenizers for the text %r%s, from token %d on: tokenizers encodes it "
                "and all later texts",
                *(text[:_SHOWN_CHARS], "..." * (len(text) > _SHOWN_CHARS), len(at)),
            )
            return


def _threads() -> int:
    """The threads that tokenizers would take."""
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "0", "off", "f", "n", "no"):
        return 1
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
