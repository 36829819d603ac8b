"""Tokenizers of Hugging Face, such as GPT-2's, and plain bytes."""

import contextlib
import functools
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from mesh_transformer import files, hub
from mesh_transformer.data.tokens import token_ids
from mesh_transformer.data.tokens.byte_tokenizer import EOT_TEXT, ByteTokenizer, bytes_of_characters, without_advice
from mesh_transformer.environment import command
from mesh_transformer.errors import UserError
from mesh_transformer.files import exists, is_remote, join, open_binary
from mesh_transformer.gguf.header import has_magic
from mesh_transformer.gguf.parts import open_parts

# replaces bytes that are not UTF-8
UNKNOWN = "\ufffd"
MAX_TEMPLATE_CHARS = 1 << 20
# a token of one byte, in vocabularies of characters
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# config.json may name the class of the tokenizer
_FILES = (*hub.TOKENIZER_FILES, *hub.CONFIG_FILES)
_MAX_CONFIG_BYTES = 1 << 20
_MAX_END_TOKENS = 15

_log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Ids are 0..n_vocab - 1, perhaps with gaps. `bos` begins a text, for some models; `eot` ends a document; each of
    `end_tokens` ends a completion, `eot` too. Tokenizers with the same `fingerprint` give the same ids. `chat_template`
    is the source of a `ChatTemplate`, if there is one, `tool_template` the source for chats with tools, if it is
    another, and `special_names` their variables: `bos_token`, `eos_token` and so on.
    """

    n_vocab: int
    bos: int | None
    eot: int
    end_tokens: tuple[int, ...]
    fingerprint: str
    chat_template: str | None
    tool_template: str | None
    special_names: Mapping[str, str]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of `text`. Names of special tokens become their ids.

        Args:
            add_special_tokens: add the tokens that the tokenizer puts around a text, such as a start token.
        """

    def encode_literal(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text. Names of special tokens are ordinary characters."""

    def encode_with_places(
        self, text: str, *, literal: bool = False, add_special_tokens: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `text`, and the first character and the stop of each in it: (0, 0) for an added token.

        Args:
            text: without halves of surrogate pairs.
            literal: names of special tokens are ordinary characters.
            add_special_tokens: add the tokens that the tokenizer puts around a text.
        """

    def decode(self, ids: Iterable[int], *, special_names: bool = False) -> str:
        """The text of `ids`, without ids outside the vocabulary, and without special tokens or with their names."""

    def token_name(self, token: int) -> str:
        """The name of a token in the vocabulary; empty for an id outside of it."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds inside a text; perhaps a part of a character.

        A special token gives its name, an id outside the vocabulary no bytes.
        """


class HubTokenizer:
    """A fast Hugging Face tokenizer. It adds start and end tokens only where it is asked to.

    Args:
        fingerprint: of its files.
        end_tokens: further tokens that end a completion, in addition to the tokenizer's end tokens.
    """

    def __init__(self, tokenizer: Any, name: str, fingerprint: str, end_tokens: Iterable[int] = ()):
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        # not the number of tokens: IDs may leave numbers out
        self.n_vocab = 1 + max(tokenizer.get_vocab().values())
        self.bos, self.eot = tokenizer.bos_token_id, _eot_id(self._backend, tokenizer, name)
        eos_ids = [self.eot] if tokenizer.eos_token_id is None else [self.eot, tokenizer.eos_token_id]
        self.end_tokens = tuple(dict.fromkeys([*eos_ids, *end_tokens]))
        self.chat_template = _chat_template(tokenizer, name, "default")
        self.tool_template = None if self.chat_template is None else _chat_template(tokenizer, name, "tool_use")
        self.special_names = tokenizer.special_tokens_map
        self.fingerprint = fingerprint

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self._backend.encode_special_tokens = False
        # `encode` would hold the interpreter lock and block all other threads
        return self._backend.encode_batch_fast([valid_text(text)], add_special_tokens=add_special_tokens)[0].ids

    def encode_literal(self, texts: Sequence[str]) -> list[list[int]]:
        self._backend.encode_special_tokens = True
        valid = [valid_text(text) for text in texts]
        return [encoding.ids for encoding in self._backend.encode_batch_fast(valid, add_special_tokens=False)]

    def encode_with_places(
        self, text: str, *, literal: bool = False, add_special_tokens: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        self._backend.encode_special_tokens = literal
        encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return encoding.ids, encoding.offsets

    def definition(self) -> dict[str, Any]:
        """The JSON object of its tokenizer.json: normalizer, splitting, vocabulary and merges, added tokens."""
        return json.loads(self._backend.to_str())

    def merged(self, word: str) -> list[int]:
        """The ids of one word, which is written in the characters of the vocabulary."""
        return [token.id for token in self._backend.model.tokenize(word)]

    def decode(self, ids: Iterable[int], *, special_names: bool = False) -> str:
        known = [i for i in map(int, ids) if 0 <= i < self.n_vocab]
        return self._backend.decode(known, skip_special_tokens=not special_names)

    def token_name(self, token: int) -> str:
        return self._backend.id_to_token(token) or "" if 0 <= token < self.n_vocab else ""

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
        bytes_of = bytes_of_characters()
        return bytes(bytes_of[c] for c in name) if bytes_of.keys() >= set(name) else name.encode()


def load_tokenizer(spec: str | None, folder: str | None = None) -> Tokenizer:
    """The tokenizer that `spec` names.

    Args:
        spec: `bytes`, a folder with tokenizer files, or a name on the Hugging Face hub, with or without hf://; None:
            `folder` if it holds tokenizer files, else gpt2 from the hub.
        folder: a model's folder, which may hold a tokenizer.

    Raises:
        UserError: there is no such tokenizer, or the hub cannot be reached.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec is None and folder is not None and has_tokenizer(folder):
        spec = folder
    spec = spec or "gpt2"
    if is_gguf(spec):
        return _from_gguf(spec)
    if hub.is_name(spec):
        return _from_folder(_download(spec), spec)
    if is_remote(spec):
        with tempfile.TemporaryDirectory() as copy:
            _copy(spec, copy, _FILES)
            return _from_folder(copy, spec)
    if os.path.isdir(spec):
        return _from_folder(spec, spec)
    if spec.startswith((".", "/", "~")):
        raise UserError(f"no such tokenizer folder: {spec}; {_WAY_OUT}")
    return _from_folder(_download(spec), spec)


def is_gguf(spec: str) -> bool:
    """Whether a tokenizer's name is a GGUF file, local, `gs://` or on the hub. Of a local file its bytes decide."""
    if hub.is_name(spec):
        return hub.gguf_file(spec) is not None
    return spec.endswith(".gguf") if is_remote(spec) else os.path.isfile(spec) and has_magic(spec)


def _gguf_files(spec: str) -> dict[str, bytes]:
    """The files of the tokenizer in a GGUF file, or, if its splitting is not known, of the one beside it."""
    from mesh_transformer.gguf.tokens import tokenizer_beside

    return tokenizer_beside(open_parts(hub.downloaded_gguf(spec) if hub.is_name(spec) else spec), _FILES)


def _from_gguf(spec: str) -> HubTokenizer:
    with tempfile.TemporaryDirectory() as made:
        for file, content in _gguf_files(spec).items():
            files.replace(join(made, file), content)
        return _from_folder(made, spec)


def warn_of_more_ids(tokenizer: Tokenizer, n_vocab: int) -> None:
    """Log a warning, once in a process, if a tokenizer has IDs that a model with `n_vocab` tokens does not have."""
    if tokenizer.n_vocab > n_vocab:
        _warn_of_more_ids(tokenizer.fingerprint, tokenizer.n_vocab, n_vocab)


@functools.cache
def _warn_of_more_ids(fingerprint: str, ids: int, n_vocab: int) -> None:
    _log.warning(
        "the tokenizer has IDs up to %d, model.n_vocab is %d: a text with an ID above %d is refused; data.tokenizer "
        "chooses another tokenizer",
        *(ids - 1, n_vocab, n_vocab - 1),
    )


def save_tokenizer(spec: str, folder: str) -> None:
    """Copy the tokenizer files of a folder or a hub repository to `folder`, or write the files of `bytes`; both may
    be on gs://.

    Raises:
        UserError: there is no such tokenizer.
    """
    if spec == "bytes":
        for name, content in ByteTokenizer.files().items():
            files.replace(join(folder, name), content)
        return
    if is_gguf(spec):
        for name, content in _gguf_files(spec).items():
            if name in hub.TOKENIZER_FILES:
                files.replace(join(folder, name), content)
        return
    source = spec if is_remote(spec) or os.path.isdir(spec) else _download(spec)
    _copy(source, folder, hub.TOKENIZER_FILES)


_WAY_OUT = (
    "give a folder that holds tokenizer.json, or vocab.json and merges.txt (--set data.tokenizer=FOLDER; "
    f"--tokenizer FOLDER for {command('records')}), or `bytes`"
)


def has_tokenizer(folder: str) -> bool:
    """Whether a folder, local or `gs://`, holds tokenizer files."""
    return any(exists(join(folder, name)) for name in hub.VOCABULARIES)


def _copy(source: str, target: str, names: Iterable[str]) -> None:
    """Copy the files that exist. Both folders may be on gs://."""
    for name in names:
        if exists(join(source, name)):
            with open_binary(join(source, name)) as file, open_binary(join(target, name), "wb") as copy:
                shutil.copyfileobj(file, copy)


def _download(name: str) -> str:
    """The folder with the tokenizer files of hub repository `name`."""
    try:
        return hub.description_folder(name)
    except UserError as error:
        raise UserError(f"tokenizer {name!r} is no folder here: {error}; {_WAY_OUT}") from error


def _from_folder(folder: str, name: str) -> HubTokenizer:
    with without_advice():
        import transformers

    if not has_tokenizer(folder):
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
        token_ids.check_files(folder, name)
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not getattr(tokenizer, "is_fast", False) or len(tokenizer) <= 1:
        raise UserError(f"{name}: its tokenizer is empty or not supported; {_WAY_OUT}")
    token_ids.check_vocabulary(tokenizer.get_vocab(), place)
    hub_tokenizer = HubTokenizer(tokenizer, name, _fingerprint(folder, name), _end_tokens(folder, name))
    # some faults of a normalizer or a decoder appear only in use
    with _errors_explained(place), contextlib.suppress(Exception):
        hub_tokenizer.decode(hub_tokenizer.encode("a é"))
        hub_tokenizer.encode("a é", add_special_tokens=True)
    return hub_tokenizer


@contextlib.contextmanager
def _errors_explained(place: str) -> Iterator[None]:
    """Turns errors and panics of the Rust library into a UserError. The class of its panics cannot be imported."""
    try:
        yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if isinstance(error, UserError) or not (panic or isinstance(error, Exception)):
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


def _end_tokens(folder: str, name: str) -> list[int]:
    """The ids in `eos_token_id` of generation_config.json, or of config.json if there is no such file."""
    files = [file for file in ("generation_config.json", "config.json") if os.path.isfile(os.path.join(folder, file))]
    if not files:
        return []
    place, eos = join(name, files[0]), _config(folder, name, files[0]).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if len(ids) > _MAX_END_TOKENS or not all(type(id) is int and 0 <= id < 2**31 for id in ids):
        raise UserError(f"{place}: eos_token_id must be a token ID or a list of at most {_MAX_END_TOKENS}; got {eos}")
    return ids


def _fingerprint(folder: str, name: str) -> str:
    """A hash of the files that decide which ids a text gets. config.json may name the class of the tokenizer."""
    hashed = hashlib.sha256()
    paths = set(glob.glob(os.path.join(glob.escape(folder), "tokenizer*.json")))
    paths |= {os.path.join(folder, file) for file in hub.TOKENIZER_FILES if file != "chat_template.jinja"}
    for path in sorted(filter(os.path.isfile, paths)):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        hashed.update(f"{os.path.basename(path)} {digest}\n".encode())
    if os.path.isfile(os.path.join(folder, "config.json")):
        config = _config(folder, name, "config.json")
        hashed.update(json.dumps([config.get("model_type"), config.get("tokenizer_class")]).encode())
    return hashed.hexdigest()


def _config(folder: str, name: str, file_name: str) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is too large."""
    with open(os.path.join(folder, file_name), "rb") as file:
        content = file.read(_MAX_CONFIG_BYTES + 1)
    try:
        config = json.loads(content) if len(content) <= _MAX_CONFIG_BYTES else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{join(name, file_name)} is not a JSON object ({error}): correct it or delete it") from error
    if not isinstance(config, dict):
        raise UserError(f"{join(name, file_name)} is not a JSON object: correct it or delete it")
    return config


def _chat_template(tokenizer: Any, name: str, kind: str) -> str | None:
    """The chat template of this name. A folder may have several; a single one is the default."""
    templates = tokenizer.chat_template
    source = (templates if isinstance(templates, dict) else {"default": templates}).get(kind)
    if source is not None and not (isinstance(source, str) and len(source) <= MAX_TEMPLATE_CHARS):
        raise UserError(f"{name}: its chat template must be a text of at most {MAX_TEMPLATE_CHARS} characters")
    return source


def valid_text(text: str) -> str:
    """`text` with lone surrogates replaced: UTF-8 cannot encode them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
