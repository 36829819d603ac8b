"""Byte-level BPE as data: what another library needs to give the ids of a tokenizer.json.

`read` accepts a tokenizer only if such a library gives the same ids. It checks the tables: a merge has the rank of the
token that it makes, and each token is made from its own bytes.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mesh_transformer.data.tokens.byte_tokenizer import bytes_of_characters

# the words of a text, by family; each pattern matches every character
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_PATTERNS = (_GPT2, _LLAMA3, _QWEN2, _QWEN3_5)
# bytes that UTF-8 never has: 0xC0, 0xC1, 0xF5 to 0xFF
_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1} - frozenset(range(0xF5, 0x100))
# an entry of `model` that must have one of these values
_MODEL: dict[str, tuple[Any, ...]] = {
    "type": ("BPE",),
    "dropout": (None, 0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (False, None),
}


class Unsupported(Exception):
    """The tokenizer is not byte-level BPE, or its tables do not have the supported form; says why."""


@dataclass(frozen=True)
class Names:
    """Names of added tokens, which are found in a text before it is split into words.

    Args:
        pattern: finds the longest name. None: no name of this kind has an id.
        ids: by name. A name without an id is the name of a special token; it stays text.
    """

    pattern: re.Pattern[str] | None
    ids: Mapping[str, int]

    def split(self, text: str) -> Iterator[str | int]:
        """The text between the names, and the ids of the names, in order."""
        start = 0
        for match in self.pattern.finditer(text) if self.pattern is not None else ():
            id = self.ids.get(match[0])
            if id is None:
                continue
            if match.start() > start:
                yield text[start : match.start()]
            yield id
            start = match.end()
        if start < len(text):
            yield text[start:]


@dataclass(frozen=True)
class ByteLevel:
    """A vocabulary of byte-level BPE.

    Args:
        ranks: the id of each token by its bytes. Of two merges the one whose token has the lower id comes first. A
            word that is a token needs no merge.
        pattern: matches one word after the other.
        nfc: texts are normalized to NFC before they are split into words.
        given: names that are found in the text as it is given.
        normalized: names that are found in the normalized text.
    """

    ranks: Mapping[bytes, int]
    pattern: str
    nfc: bool
    given: Names
    normalized: Names

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of characters in `pattern`, as patterns of one character."""
        classes = sorted(set(re.findall(r"\\p\{\w+\}|\\s", self.pattern)))
        return (*classes, "(?i:[a-z])") if "(?i:" in self.pattern else tuple(classes)


def read(definition: Mapping[str, Any], merge: Callable[[str], list[int]]) -> ByteLevel:
    """The vocabulary in the JSON object of a tokenizer.json.

    Args:
        merge: the ids that the tokenizer's own model gives to a word, which is written in the characters of the
            vocabulary.

    Raises:
        Unsupported: it is of another kind, or a token is not made by the merges as another library makes it.
    """
    normalizer = definition.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        raise Unsupported(f"its normalizer is {str(normalizer)[:100]}")
    pattern = _pattern(definition.get("pre_tokenizer"))
    model = definition["model"]
    for name, allowed in _MODEL.items():
        if model.get(name) not in allowed:
            raise Unsupported(f"its model has {name} {str(model.get(name))[:100]}")
    added = definition.get("added_tokens", [])
    given, normalized = ([a for a in added if a["normalized"] is kind] for kind in (False, True))
    if normalizer is not None and not all(entry["content"].isascii() for entry in normalized):
        raise Unsupported("an added token is normalized")
    ranks = _ranks(model, merge)
    return ByteLevel(ranks, pattern, normalizer is not None, _names(given), _names(normalized))


def _pattern(splitter: Any) -> str:
    """The pattern of the words. `splitter`: the entry `pre_tokenizer`."""
    unknown = Unsupported(f"its pre-tokenizer is {str(splitter)[:200]}")
    if not isinstance(splitter, dict):
        raise unknown
    *before, last = splitter.get("pretokenizers") or [splitter]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise unknown
    if not before and last.get("use_regex", True):
        return _GPT2
    if len(before) == 1 and before[0].get("type") == "Split" and not last.get("use_regex", True):
        split = before[0]
        pattern = split["pattern"].get("Regex")
        # the matches are the words: the splitter isolates them, or removes the text between them
        if pattern in _PATTERNS and (split["behavior"], split["invert"]) in (("Isolated", False), ("Removed", True)):
            return str(pattern)
    raise unknown


def _ranks(model: Mapping[str, Any], merge: Callable[[str], list[int]]) -> dict[bytes, int]:
    """The ids of the tokens that merges can make."""
    vocabulary, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    bytes_of = bytes_of_characters()
    single = {character for character in bytes_of if character in vocabulary}
    if missing := _UTF8_BYTES - {bytes_of[character] for character in single}:
        raise Unsupported(f"its vocabulary has no token for {len(missing)} bytes")
    _check_order(vocabulary, merges, single, whole_words=bool(model.get("ignore_merges")))
    if model.get("ignore_merges"):
        tokens = [token for token in vocabulary if token and bytes_of.keys() >= set(token)]
        _check_all_pairs(tokens, vocabulary, set(merges))
    else:
        tokens = [*single, *(left + right for left, right in merges)]
        for token in tokens:
            if merge(token) != [vocabulary[token]]:
                raise Unsupported(f"its merges do not make the token {token[:100]!r}")
    return {bytes(bytes_of[character] for character in token): vocabulary[token] for token in tokens}


def _check_order(
    vocabulary: Mapping[str, int], merges: list[tuple[str, ...]], single: set[str], *, whole_words: bool
) -> None:
    """Check that merges are in the order of the ids that they make, and use only earlier tokens.

    Args:
        whole_words: several merges may make one token, also of later tokens.
    """
    before = -1
    for left, right in merges:
        id = vocabulary[left + right]
        if id < before or (id == before and not whole_words):
            raise Unsupported(f"its merges are not in the order of the ids: {left[:50]!r} and {right[:50]!r}")
        before = id
        if not whole_words and any(part not in single and vocabulary[part] >= id for part in (left, right)):
            raise Unsupported(f"the merge of {left[:50]!r} and {right[:50]!r} uses a later token")


def _check_all_pairs(tokens: list[str], vocabulary: Mapping[str, int], merges: set[tuple[str, ...]]) -> None:
    """Check that any two tokens that together are a token have a merge."""
    for token in tokens:
        for at in range(1, len(token)):
            pair = token[:at], token[at:]
            if pair[0] in vocabulary and pair[1] in vocabulary and pair not in merges:
                raise Unsupported(f"its merges do not have {pair[0][:50]!r} and {pair[1][:50]!r}")


def _names(added: list[Mapping[str, Any]]) -> Names:
    """The names of entries of `added_tokens`. A special token's name stays text, and no other name is found in it."""
    ids = {entry["content"]: entry["id"] for entry in added if not entry["special"]}
    for entry in added:
        if not entry["special"] and (entry["single_word"] or entry["lstrip"] or entry["rstrip"]):
            raise Unsupported(f"its added token {entry['content'][:100]!r} takes characters beside it, or needs them")
    if not ids:
        return Names(None, {})
    groups: dict[str, list[str]] = {}
    for name in sorted({entry["content"] for entry in added} - {""}, key=len, reverse=True):
        groups.setdefault(name[0], []).append(name)
    return Names(re.compile("|".join(map(_longest_of, groups.values()))), ids)


def _longest_of(names: list[str]) -> str:
    """A pattern for the longest of some names, which are sorted by falling length. Their common beginning stands
    first, so that the search passes quickly over other text."""
    start = os.path.commonprefix(names)
    return re.escape(start) + "(?:" + "|".join(re.escape(name[len(start) :]) for name in names) + ")"
