"""The encoder tiktoken for a byte-level vocabulary. It is some five times as fast as tokenizers."""

import re
from typing import Any

from mesh_transformer.data.tokens.byte_level import ByteLevel, Unsupported

# earlier versions take quadratic time for a long word
_OLDEST = (0, 14)
# tiktoken panics on some 300,000 characters of white space; other words of a million characters take 0.3 s
_LONG_SPACE = re.compile(r"(?<!\s)\s{50000}")

# characters that are compared at once
_BLOCK = 1 << 14


class TiktokenEncoder:
    """Encodes texts with tiktoken. It keeps no cache: memory holds the vocabulary and one text.

    Raises:
        ImportError: tiktoken is not installed.
        Unsupported: it is too old, or it divides the characters into other classes than tokenizers does.
    """

    def __init__(self, level: ByteLevel):
        import tiktoken
        from tokenizers import normalizers

        version = tuple(int(number) for number in re.findall(r"\d+", tiktoken.__version__)[:2])
        if version < _OLDEST:
            raise Unsupported(f"tiktoken is of version {tiktoken.__version__}, {_OLDEST[0]}.{_OLDEST[1]} is needed")
        for characters in level.classes:
            _compare_class(characters)
        made = tiktoken.Encoding("literal", pat_str=level.pattern, mergeable_ranks=dict(level.ranks), special_tokens={})
        # encode_to_numpy is slower
        self._encode = made.encode_ordinary
        self._level = level
        # the normalizer of the tokenizers library itself: Python's may know other characters
        self._nfc = normalizers.NFC().normalize_str

    def encode(self, text: str) -> list[int] | None:
        """The ids of `text`, which has no lone surrogates; None for a text on which tiktoken may panic."""
        if _LONG_SPACE.search(text):
            return None
        level = self._level
        if level.given.pattern is None and level.normalized.pattern is None:
            return self._encode(self._normal(text))
        ids: list[int] = []
        for part in level.given.split(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            for word in level.normalized.split(self._normal(part)):
                if isinstance(word, int):
                    ids.append(word)
                else:
                    ids += self._encode(word)
        return ids

    def _normal(self, text: str) -> str:
        return self._nfc(text) if self._level.nfc and not text.isascii() else text


def _compare_class(characters: str) -> None:
    """Compare the class of each character of Unicode between the two libraries.

    Args:
        characters: a pattern of one character.

    Raises:
        Unsupported: they differ; names a character.
    """
    import tiktoken
    from tokenizers import Regex, normalizers

    single: Any = {bytes([byte]): byte for byte in range(256)}
    # what matches no word is left out
    made = tiktoken.Encoding("class", pat_str=f"{characters}+", mergeable_ranks=single, special_tokens={})
    without = normalizers.Replace(Regex(f"{characters}+"), "").normalize_str
    for first in range(0, 0x110000, _BLOCK):
        block = "".join(chr(code) for code in range(first, first + _BLOCK) if not 0xD800 <= code < 0xE000)
        others, members = without(block), bytes(made.encode_ordinary(block)).decode()
        # most blocks have no character of the class
        if others == block and not members:
            continue
        if different := set(block).difference(others) ^ set(members):
            raise Unsupported(f"tiktoken and tokenizers differ on {characters} and U+{ord(min(different)):04X}")
