"""A tokenizer without a vocabulary: a token is a byte."""

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

EOT_TEXT = "<|endoftext|>"


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and 256 for the end of a document."""

    n_vocab = 257
    bos: int | None = None
    eot = 256
    end_tokens: tuple[int, ...] = (256,)
    fingerprint = "bytes"
    chat_template: str | None = None
    tool_template: str | None = None
    special_names: Mapping[str, str] = {"eos_token": EOT_TEXT}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def encode_literal(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_with_places(
        self, text: str, *, literal: bool = False, add_special_tokens: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        places = [(at, at + 1) for at, character in enumerate(text) for _ in character.encode("utf-8", "replace")]
        return self.encode(text), places

    def decode(self, ids: Iterable[int], *, special_names: bool = False) -> str:
        known = (i for i in map(int, ids) if special_names or i != self.eot)
        return b"".join(map(self.token_bytes, known)).decode("utf-8", "replace")

    def token_name(self, token: int) -> str:
        return f"<0x{token:02X}>" if 0 <= token < self.eot else self.token_bytes(token).decode()

    def token_bytes(self, token: int) -> bytes:
        if token == self.eot:
            return EOT_TEXT.encode()
        return bytes([token]) if 0 <= token < self.eot else b""

    @staticmethod
    def files() -> dict[str, bytes]:
        """The files of this tokenizer for transformers, by name. There, EOT_TEXT inside a text is the token 256."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        # pairs of bytes that are never merged; use_regex would only split the text into words
        made = Tokenizer(models.BPE(vocab=bytes_of_characters(), merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken(EOT_TEXT, special=True, normalized=False)])
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOT_TEXT,
            "clean_up_tokenization_spaces": False,
        }
        return {
            "tokenizer.json": made.to_str(pretty=True).encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        }


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Silence the warning of transformers' first import that PyTorch is missing."""
    before = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]


@functools.cache
def bytes_of_characters() -> dict[str, int]:
    """The byte that each character stands for in the token names of byte-level vocabularies, such as GPT-2's."""
    with without_advice():
        from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
