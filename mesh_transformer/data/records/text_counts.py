"""How many documents, tokens and bytes of text a data set has, counted when it was prepared: for bits per byte."""

import dataclasses
import json
import math
import os
from typing import Any, Self

from mesh_transformer import files
from mesh_transformer.errors import UserError

# of a data set, beside its index files
MANIFEST = "manifest.json"
# an index file, and its part of the manifest
_SIDES = {"train.index": "train", "val.index": "val"}
_MAX_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class TextCounts:
    """The size of a text.

    Args:
        documents: how many have tokens.
        tokens: of all documents, with the token that ends each of them.
        bytes: of the text in UTF-8, as it was given to the tokenizer.
    """

    documents: int
    tokens: int
    bytes: int

    def bits_per_byte(self, nats_per_token: float) -> float:
        """The bits that a byte of the text takes, if a token takes `nats_per_token` in the mean."""
        return nats_per_token / math.log(2) * self.tokens / self.bytes

    def to_json(self) -> str:
        """The object that `of` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, entry: Any) -> Self | None:
        """The counts in an object of JSON; None if one of them is missing or not a positive whole number."""
        names = [field.name for field in dataclasses.fields(cls)]
        numbers: list[Any] = [entry.get(name) for name in names] if isinstance(entry, dict) else []
        return cls(*numbers) if numbers and all(type(number) is int and number > 0 for number in numbers) else None


def counts_of_index(path: str) -> TextCounts | None:
    """The counts of an index file, local or `gs://`, which `manifest.json` beside it has.

    None without such a file, for a manifest of another program, and for an index file of another name.

    Raises:
        UserError: the manifest has counts and cannot be read.
    """
    folder, name = path.rpartition("/")[::2] if files.is_remote(path) else os.path.split(path)
    side, manifest = _SIDES.get(name), files.join(folder, MANIFEST)
    if side is None or not files.exists(manifest):
        return None
    with files.open_binary(manifest) as file:
        content = file.read(_MAX_BYTES + 1)
    try:
        if len(content) > _MAX_BYTES:
            raise ValueError(f"longer than {_MAX_BYTES} bytes")
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{manifest} cannot be read ({error}): copy it again from where the data was made, or delete it to train "
            f"without bits per byte"
        ) from error
    return TextCounts.of(parsed.get(side)) if isinstance(parsed, dict) else None


def cached_counts(records: str) -> str:
    """The file with the counts of a text whose `records` are in the user's cache folder."""
    return f"{os.path.splitext(records)[0]}.json"


def counts_of_cached(records: str) -> TextCounts | None:
    """The counts of a text whose `records` are in the user's cache folder. None if they are not there."""
    try:
        with open(cached_counts(records), "rb") as file:
            return TextCounts.of(json.loads(file.read(_MAX_BYTES)))
    except (FileNotFoundError, ValueError):
        return None


def utf8_bytes(text: str) -> int:
    """The bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
