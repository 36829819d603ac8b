"""Trains a byte-level BPE tokenizer, as GPT-2's, and writes it as a Hugging Face folder."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mesh_transformer import files
from mesh_transformer.data.chat.new_template import NewTemplate
from mesh_transformer.data.corpus.formats.base import Bad
from mesh_transformer.data.corpus.pieces import TextPiece
from mesh_transformer.data.tokens.byte_tokenizer import EOT_TEXT
from mesh_transformer.data.tokens.tokenizer import has_tokenizer, valid_text
from mesh_transformer.dataset.fragment import fraction
from mesh_transformer.dataset.inputs import Input, read_inputs
from mesh_transformer.dataset.options import PrepareOptions
from mesh_transformer.dataset.parts import FilePart, pieces, plan
from mesh_transformer.dataset.worker import failures_explained
from mesh_transformer.errors import UserError, plural
from mesh_transformer.logs import Progress, log

_BYTES = 256
# published vocabularies have at most 2**18 tokens
_MAX_VOCAB = 1 << 20
_MAX_SPECIAL_CHARS = 100
# such as an encoded picture
_LONG_WORD = re.compile(r"(?<!\S)\S{10000}|(?<!\s)\s{10000}")
_PART_CHARS = 1000
# a document of more bytes waits in a file until its hash is known
_HELD_BYTES = 1 << 20


@dataclass(frozen=True)
class Training:
    """The options of a training.

    Args:
        vocab: the number of tokens, with the 256 bytes, the separator and the special tokens.
        special: names of further special tokens, which follow the separator.
        chat_template: its special tokens follow these.
        column: the name of the text in rows and JSON objects.
        on_error: whether a place that is not a document is counted or ends the training.
    """

    vocab: int
    special: tuple[str, ...] = ()
    column: str = PrepareOptions.column
    on_error: Literal["skip", "stop"] = PrepareOptions.on_error
    chat_template: NewTemplate | None = None

    @property
    def special_names(self) -> tuple[str, ...]:
        """The names of all special tokens, by their ids."""
        of_template = self.chat_template.special if self.chat_template else ()
        return (EOT_TEXT, *self.special, *(name for name in of_template if name not in self.special))

    def __post_init__(self) -> None:
        names = self.special_names
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
        documents: the number of non-empty documents.
        bad: places that are not documents.
    """

    folder: str
    vocab: int
    documents: int
    bad: int


def train(inputs: Sequence[str], folder: str, training: Training) -> Trained:
    """Train a tokenizer on text, and write `tokenizer.json` and `tokenizer_config.json` into a new folder.

    The special tokens have the first ids, `<|endoftext|>` has the id 0. With a chat template, `chat_template.jinja` and
    `generation_config.json` are written too, and an answer ends with the token after it in the template. The result
    depends on the text alone. Memory holds the distinct words of the text and their counts, not the text.

    Args:
        inputs: X or X=SHARE, as `read_inputs` accepts them. `<|endoftext|>` in a text ends a document.
        folder: local or gs://.

    Raises:
        UserError: an input is missing or damaged, two inputs have a common file, a place is not a document, the text is
            empty, or the folder already has a tokenizer.
        RunError: a disk or a bucket fails.
    """
    sources = read_inputs(inputs)
    _check_output(folder)
    with failures_explained("give the same command again"):
        counted = _CountedTexts(sources, plan(sources, PrepareOptions().part_bytes, training.column), training)
        made = _train(counted, training)
    if not counted.documents:
        raise UserError(f"{', '.join(inputs)}: there is no text to train on: add text")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOT_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    if (template := training.chat_template) is not None:
        ends = [made.token_to_id(name) for name in dict.fromkeys([template.end, EOT_TEXT])]
        files.replace(files.join(folder, "generation_config.json"), json.dumps({"eos_token_id": ends}).encode())
        files.replace(files.join(folder, "chat_template.jinja"), template.source.encode())
    # the last file makes the folder a tokenizer
    files.replace(files.join(folder, "tokenizer_config.json"), json.dumps(config, indent=2).encode())
    files.replace(files.join(folder, "tokenizer.json"), made.to_str(pretty=True).encode())
    return Trained(folder, made.get_vocab_size(), counted.documents, counted.bad)


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
        special_tokens=list(training.special_names),
        # every text has ids: the bytes that the text does not have are tokens too
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


class _CountedTexts(Iterator[str]):
    """The text of parts in pieces, with a progress line; counts the documents and the bad places."""

    def __init__(self, inputs: Sequence[Input], parts: Sequence[FilePart], training: Training):
        self.documents = self.bad = 0
        self._training = training
        self._pieces = self._read(inputs, parts)

    def __next__(self) -> str:
        return next(self._pieces)

    def _read(self, inputs: Sequence[Input], parts: Sequence[FilePart]) -> Iterator[str]:
        progress = Progress("reading", None, unit="piece", leave=False)
        count, has_text = 0, False
        try:
            for part in parts:
                for piece in self._good(_taken(pieces(part, self._training.column), inputs[part.input].share)):
                    count += 1
                    for number, text in enumerate(piece.text.split(EOT_TEXT)):
                        if number:
                            self.documents += has_text
                            has_text = False
                        has_text = has_text or bool(text)
                        yield from _bounded(valid_text(text))
                    if piece.ends:
                        self.documents += has_text
                        has_text = False
                    progress.update(count)
        finally:
            progress.close()

    def _good(self, items: Iterable[TextPiece | Bad]) -> Iterator[TextPiece]:
        """The pieces. After a bad place a document begins; what was read of the one before it counts as text."""
        for item in items:
            if isinstance(item, TextPiece):
                yield item
                continue
            if self._training.on_error == "stop":
                raise UserError(item.message)
            log.debug("%s", item.message)
            self.bad += 1
            yield TextPiece("", True)


def _taken(items: Iterable[TextPiece | Bad], share: float) -> Iterator[TextPiece | Bad]:
    """The documents in a share, which their hashes decide, as in `write_fragment`."""
    if share == 1:
        yield from items
        return
    with tempfile.SpooledTemporaryFile(_HELD_BYTES) as held:
        sizes: list[int] = []
        digest = hashlib.blake2b(digest_size=16)
        for item in items:
            if isinstance(item, TextPiece):
                # JSON may hold halves of surrogate pairs
                data = item.text.encode("utf-8", "surrogatepass")
                digest.update(data)
                held.write(data)
                sizes.append(len(data))
                if not item.ends:
                    continue
                if fraction(digest.digest(), b"share") < share:
                    held.seek(0)
                    for number, size in enumerate(sizes, 1):
                        yield TextPiece(held.read(size).decode("utf-8", "surrogatepass"), number == len(sizes))
            else:
                yield item
            sizes, digest = [], hashlib.blake2b(digest_size=16)
            held.seek(0)
            held.truncate()


def _bounded(text: str) -> Iterator[str]:
    """The text; in short parts if it has a long word, because the trainer keeps each word that it counts."""
    step = _PART_CHARS if _LONG_WORD.search(text) else len(text) or 1
    for at in range(0, len(text), step):
        yield text[at : at + step]
