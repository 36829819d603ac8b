"""Trains a byte-level BPE tokenizer, as GPT-2's, and writes it as a Hugging Face folder."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_transformer import files
from mesh_transformer.data.byte_tokenizer import EOT_TEXT
from mesh_transformer.data.corpus import file_pieces, input_files
from mesh_transformer.data.tokenizer import has_tokenizer, valid_text
from mesh_transformer.errors import UserError, plural
from mesh_transformer.logs import Progress

_BYTES = 256
# published vocabularies have at most 2**18 tokens
_MAX_VOCAB = 1 << 20
_MAX_SPECIAL_CHARS = 100
# such as an encoded picture
_LONG_WORD = re.compile(r"(?<!\S)\S{10000}|(?<!\s)\s{10000}")
_PART_CHARS = 1000


@dataclass(frozen=True)
class Training:
    """What is trained.

    Args:
        vocab: the number of tokens, with the 256 bytes, the separator and the special tokens.
        special: names of further special tokens, which follow the separator.
    """

    vocab: int
    special: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = (EOT_TEXT, *self.special)
        least = _BYTES + len(names)
        if not least <= self.vocab <= _MAX_VOCAB:
            raise UserError(
                f"--vocab {self.vocab}: must be {least} ({_BYTES} bytes and {plural(len(names), 'special token')}) to "
                f"{_MAX_VOCAB}"
            )
        for name in self.special:
            if not name or len(name) > _MAX_SPECIAL_CHARS or name != name.strip() or valid_text(name) != name:
                raise UserError(
                    f"--special {name!r}: must be 1 to {_MAX_SPECIAL_CHARS} characters without white space at its ends"
                )
            if names.count(name) > 1:
                raise UserError(f"--special {name!r}: is there twice; {EOT_TEXT} is always a special token")


@dataclass(frozen=True)
class Trained:
    """What `train` wrote.

    Args:
        vocab: the number of tokens; less than asked for where the text has too few words.
        documents: of the text, without empty ones.
    """

    folder: str
    vocab: int
    documents: int


def train(inputs: Sequence[str], folder: str, training: Training) -> Trained:
    """Train a tokenizer on text, and write `tokenizer.json` and `tokenizer_config.json` into a new folder.

    The special tokens have the first ids, `<|endoftext|>` has the id 0. The result depends on the text alone. Memory
    holds the distinct words of the text and their counts, not the text.

    Args:
        inputs: files or folders, as `input_files` accepts them. `<|endoftext|>` in a text ends a document.
        folder: local or gs://.

    Raises:
        UserError: an input is missing or damaged, two inputs are the same, the text is empty, or the folder already has
            a tokenizer.
    """
    found = [input_files(source) for source in inputs]
    paths = [path for group in found for path in group]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise UserError(f"{twice} is in two inputs: name each --input once")
    _check_output(folder)
    counted = _Counted(paths)
    made = _train(counted, training)
    if not counted.documents:
        raise UserError(f"{', '.join(inputs)}: there is no text to train on: add text")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOT_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    # the last file makes the folder a tokenizer
    files.replace(files.join(folder, "tokenizer_config.json"), json.dumps(config, indent=2).encode())
    files.replace(files.join(folder, "tokenizer.json"), made.to_str(pretty=True).encode())
    return Trained(folder, made.get_vocab_size(), counted.documents)


def _check_output(folder: str) -> None:
    """Check that a tokenizer can be written, before minutes of training."""
    if files.is_remote(folder):
        files.check_credentials()
    else:
        files.check_writable(folder)
        os.makedirs(folder, exist_ok=True)
    if has_tokenizer(folder):
        raise UserError(f"{folder} already has a tokenizer: choose another --output, or delete its files")


def _train(texts: Iterator[str], training: Training) -> Any:
    """The trained `tokenizers.Tokenizer`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=training.vocab,
        min_frequency=2,
        special_tokens=[EOT_TEXT, *training.special],
        # every text has ids: the bytes that the text does not have are tokens too
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


class _Counted(Iterator[str]):
    """The text of files in pieces, with a progress line; counts the documents."""

    def __init__(self, paths: Sequence[str]):
        self.documents = 0
        self._pieces = self._read(paths)

    def __next__(self) -> str:
        return next(self._pieces)

    def _read(self, paths: Sequence[str]) -> Iterator[str]:
        progress = Progress("reading", None, unit="piece", leave=False)
        count, has_text = 0, False
        try:
            for path in paths:
                for piece in file_pieces(path, EOT_TEXT):
                    count, has_text = count + 1, has_text or bool(piece.text)
                    yield from _bounded(valid_text(piece.text))
                    if piece.ends:
                        self.documents += has_text
                        has_text = False
                    progress.update(count)
        finally:
            progress.close()


def _bounded(text: str) -> Iterator[str]:
    """The text; in short parts if it has a long word, because the trainer keeps each word that it counts."""
    step = _PART_CHARS if _LONG_WORD.search(text) else len(text) or 1
    for at in range(0, len(text), step):
        yield text[at : at + step]
