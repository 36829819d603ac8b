"""Checks the token IDs in tokenizer files before the tokenizers library reads them.

The library makes an entry for each number below the largest ID when it writes or copies a tokenizer: a file of 250
bytes can ask for gigabytes, in a call that no signal ends.
"""

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mesh_transformer.errors import UserError
from mesh_transformer.files import join

# IDs up to here are allowed in each tokenizer; published vocabularies have at most 2**18 tokens
_ALWAYS_ALLOWED = 1 << 20
# IDs up to this many times the number of tokens
_HOLES = 4
# the field of a Unigram model with the ID of its token for unknown text
_UNKNOWN = "unk_id"
# a line of a file that tiktoken reads
_TIKTOKEN = re.compile(rb"\s*([A-Za-z0-9+/=]+)\s+(\d{1,30})\s*")
# name of a token, its ID
Entry = tuple[str, Any]


def check_files(folder: str, name: str) -> None:
    """Check the IDs in the files of a tokenizer's local folder.

    Args:
        name: of the folder in messages.

    Raises:
        UserError: an ID is too large.
        ValueError: a file is not JSON.
    """
    paths = glob.glob(os.path.join(glob.escape(folder), "tokenizer*.json"))
    paths += [os.path.join(folder, file) for file in ("vocab.json", "added_tokens.json", "tokenizer.model")]
    by_file = {os.path.basename(path): list(_entries(path)) for path in paths if os.path.isfile(path)}
    tokens = {token for entries in by_file.values() for token, _ in entries} - {_UNKNOWN}
    for file, entries in by_file.items():
        _check(entries, len(tokens), join(name, file))


def check_vocabulary(vocabulary: Mapping[str, int], place: str) -> None:
    """Check the IDs of a tokenizer that was read, perhaps from a file that `check_files` does not know.

    Raises:
        UserError: an ID is too large.
    """
    _check(vocabulary.items(), len(vocabulary), place)


def _check(entries: Iterable[Entry], n_tokens: int, place: str) -> None:
    largest = max(_ALWAYS_ALLOWED, _HOLES * n_tokens)
    for token, id in entries:
        if isinstance(id, int | float) and id > largest:
            raise UserError(
                f"{place}: the token {token[:100]!r} has the ID {str(id)[:20]}; with {n_tokens} tokens IDs may be at "
                f"most {largest}: number the tokens from 0 without large gaps"
            )


def _entries(path: str) -> Iterator[Entry]:
    """The names and IDs in a file; a name or an ID may occur again."""
    with open(path, "rb") as file:
        if os.path.basename(path) == "tokenizer.model":
            # SentencePiece's files have no IDs
            yield from ((match[1].decode(), int(match[2])) for match in map(_TIKTOKEN.fullmatch, file) if match)
            return
        try:
            content = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.path.basename(path)} is not JSON: {error}") from error
    if os.path.basename(path) in ("vocab.json", "added_tokens.json"):
        yield from _vocabulary(content)
        return
    # the keys of tokenizer.json and of tokenizer_config.json, because a file may have the other name
    content = _object(content)
    model = _object(content.get("model"))
    yield from _vocabulary(model.get("vocab"))
    yield _UNKNOWN, model.get(_UNKNOWN)
    for token in _list(content.get("added_tokens")):
        yield _named(token), _object(token).get("id")
    yield from _special_tokens(content.get("post_processor"))
    for id, token in _object(content.get("added_tokens_decoder")).items():
        try:
            yield _named(token), int(id)
        except ValueError:
            continue


def _vocabulary(vocabulary: Any) -> Iterator[Entry]:
    """The entries of {token: ID}, or of a Unigram model's list, in which the place of a token is its ID."""
    if isinstance(vocabulary, list):
        for id, pair in enumerate(vocabulary):
            yield str(pair[0]) if isinstance(pair, list) and pair else str(pair), id
    yield from _object(vocabulary).items()


def _special_tokens(processor: Any) -> Iterator[Entry]:
    """The special tokens of a post-processor of type TemplateProcessing, BertProcessing or RobertaProcessing."""
    processor = _object(processor)
    for token, entry in _object(processor.get("special_tokens")).items():
        for id in _list(_object(entry).get("ids")):
            yield token, id
    for kind in ("sep", "cls"):
        pair = _list(processor.get(kind))
        if len(pair) == 2:
            yield str(pair[0]), pair[1]
    # of type Sequence
    for other in _list(processor.get("processors")):
        yield from _special_tokens(other)


def _named(token: Any) -> str:
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
