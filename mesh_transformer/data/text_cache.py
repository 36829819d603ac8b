"""Text files as training data: tokenised on first use, the records kept in the user's cache folder."""

import hashlib
import os

from mesh_transformer.data.prepare import Options, scratch_file, write_corpus
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.files import open_binary

_FORMAT = "1"  # change it when the same text comes to give other records


def cached_records(path: str, seq: int, tokenizer: str | None, cache_dir: str | None = None) -> str:
    """The record file of a text file: sequences of seq + 1 tokens, in the order of the text.

    Several processes may ask at once: each writes under a name of its own, the last to finish stays.

    Raises:
        UserError: the text is no UTF-8 or shorter than one sequence, or there is no such tokenizer.
    """
    tokens = load_tokenizer(tokenizer)
    folder = cache_dir or _default_folder()
    stem = os.path.splitext(os.path.basename(path))[0]
    target = os.path.join(folder, f"{stem}-{_key(path, seq, tokens.fingerprint)}.tfrecords")
    if os.path.isfile(target):
        return target
    os.makedirs(folder, exist_ok=True)
    with scratch_file(folder) as scratch:
        write_corpus([path], scratch, tokens, Options(seq=seq, preserve_data_order=True))
        os.replace(scratch, target)
    return target


def _default_folder() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "mesh_transformer", "datasets")


def _key(path: str, seq: int, fingerprint: str) -> str:
    begun = hashlib.sha256(f"{_FORMAT} {seq} {fingerprint}\n".encode())
    with open_binary(path) as file:
        return hashlib.file_digest(file, begun.copy).hexdigest()[:32]  # type: ignore[arg-type]
