"""Tokenizers: GPT-2's and others of Hugging Face, or plain bytes."""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from mesh_transformer import liveness
from mesh_transformer.errors import UserError
from mesh_transformer.files import exists, is_remote, join, open_binary

EOT_TEXT = "<|endoftext|>"
# replaces bytes that are not UTF-8
UNKNOWN = "\ufffd"
# a token of one byte, in vocabularies of characters
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Ids are 0..n_vocab - 1. `eot` ends a document. Tokenizers that give the same ids have the same `fingerprint`.
    """

    n_vocab: int
    eot: int
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. Names of special tokens become their ids."""

    def encode_literal(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text. Names of special tokens are ordinary characters."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens and ids outside the vocabulary."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds inside a text; perhaps a part of a character.

        A special token gives its name, an id outside the vocabulary no bytes.
        """


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and 256 for the end of a document."""

    n_vocab = 257
    eot = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def encode_literal(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < self.eot).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        if token == self.eot:
            return EOT_TEXT.encode()
        return bytes([token]) if 0 <= token < self.eot else b""


class HubTokenizer:
    """A fast Hugging Face tokenizer. It adds no start and end tokens."""

    def __init__(self, tokenizer: Any, name: str):
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.n_vocab = len(tokenizer)
        self.eot = _eot_id(self._backend, tokenizer, name)
        self.fingerprint = hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        self._backend.encode_special_tokens = False
        # `encode` would hold the interpreter lock and block all other threads
        return self._backend.encode_batch_fast([_valid(text)], add_special_tokens=False)[0].ids

    def encode_literal(self, texts: Sequence[str]) -> list[list[int]]:
        self._backend.encode_special_tokens = True
        valid = [_valid(text) for text in texts]
        return [found.ids for found in self._backend.encode_batch_fast(valid, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in map(int, ids) if 0 <= i < self.n_vocab]
        return self._backend.decode(known, skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            return b""
        first, both = (self._backend.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        if UNKNOWN not in first:
            return both[len(first) :].encode()
        # not a whole character: the name has the bytes
        name = self._backend.id_to_token(token)
        if _BYTE.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        bytes_of = _byte_level()
        return bytes(bytes_of[c] for c in name) if bytes_of.keys() >= set(name) else name.encode()


def load_tokenizer(spec: str | None, folder: str | None = None) -> Tokenizer:
    """The tokenizer that `spec` names.

    Args:
        spec: `bytes`, a folder with tokenizer files, or a name on the Hugging Face hub; None: `folder` if it holds
            tokenizer files, else gpt2 from the hub.
        folder: a model's folder, which may hold a tokenizer.

    Raises:
        UserError: there is no such tokenizer, or the hub cannot be reached.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec is None and folder is not None and _has_tokenizer(folder):
        spec = folder
    spec = spec or "gpt2"
    if is_remote(spec):
        with tempfile.TemporaryDirectory() as copy:
            _copy(spec, copy, _FILES)
            return _from_folder(copy, spec)
    if os.path.isdir(spec):
        return _from_folder(spec, spec)
    if spec.startswith((".", "/", "~")):
        raise UserError(f"no such tokenizer folder: {spec}; {_WAY_OUT}")
    return _from_folder(_download(spec), spec)


def save_tokenizer(spec: str, folder: str) -> None:
    """Copy the tokenizer files of a folder or a hub repository to `folder`; both may be on gs://.

    Raises:
        UserError: there is no such tokenizer.
    """
    source = spec if is_remote(spec) or os.path.isdir(spec) else _download(spec)
    _copy(source, folder, [name for name in _FILES if name != "config.json"])


_WAY_OUT = (
    "give a folder that holds tokenizer.json, or vocab.json and merges.txt (--set data.tokenizer=FOLDER; "
    "--tokenizer FOLDER for create_finetune_tfrecords.py), or `bytes`"
)


def _has_tokenizer(folder: str) -> bool:
    return any(exists(join(folder, name)) for name in ("tokenizer.json", "vocab.json"))


def _copy(source: str, target: str, names: Iterable[str]) -> None:
    """Copy the files that exist. Both folders may be on gs://."""
    for name in names:
        if exists(join(source, name)):
            with open_binary(join(source, name)) as file, open_binary(join(target, name), "wb") as copy:
                shutil.copyfileobj(file, copy)


def _download(name: str) -> str:
    """The folder with the tokenizer files of hub repository `name`."""
    import huggingface_hub

    try:
        with liveness.service_call():
            return huggingface_hub.snapshot_download(name, allow_patterns=list(_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(
            f"tokenizer {name!r} is no folder here and could not be fetched from the Hugging Face hub ({reason}): {_WAY_OUT}"
        ) from error


def _from_folder(folder: str, name: str) -> HubTokenizer:
    # silences its warning that PyTorch is missing
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    if not _has_tokenizer(folder):
        raise UserError(f"{name}: no tokenizer files in this folder; {_WAY_OUT}")
    has = {file for file in _FILES if os.path.isfile(os.path.join(folder, file))}
    if has & {"tokenizer_config.json", "config.json"}:
        kind: Any = transformers.AutoTokenizer
    elif "tokenizer.json" in has:
        kind = transformers.PreTrainedTokenizerFast
    else:
        kind = getattr(transformers, "GPT2TokenizerFast")  # noqa: B009  (an alias the stubs do not list)
    place = join(name, "tokenizer.json") if "tokenizer.json" in has else name
    with _errors_explained(place):
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not getattr(tokenizer, "is_fast", False) or len(tokenizer) <= 1:
        raise UserError(f"{name}: its tokenizer is empty or not supported; {_WAY_OUT}")
    found = HubTokenizer(tokenizer, name)
    # some faults of a normalizer or a decoder appear only in use
    with _errors_explained(place), contextlib.suppress(Exception):
        found.decode(found.encode("a é"))
    return found


@contextlib.contextmanager
def _errors_explained(place: str) -> Iterator[None]:
    """Turns errors and panics of the Rust library into a UserError. The class of its panics cannot be imported."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).strip().replace("\n", " ")
        raise UserError(f"{place}: the tokenizer cannot be read ({reason}); {_WAY_OUT}"[:800]) from error


def _eot_id(backend: Any, tokenizer: Any, name: str) -> int:
    """The id of `<|endoftext|>`, or of the tokenizer's own end token if the vocabulary has none."""
    eot = backend.token_to_id(EOT_TEXT)
    eot = tokenizer.eos_token_id if eot is None else eot
    if eot is None:
        raise UserError(
            f"{name}: its tokenizer has no end-of-text token: add an eos_token to its tokenizer_config.json"
        )
    return int(eot)


@functools.cache
def _byte_level() -> dict[str, int]:
    """The byte that each character stands for in the token names of byte-level vocabularies, such as GPT-2's."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def _valid(text: str) -> str:
    """`text` with lone surrogates replaced: UTF-8 cannot encode them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
