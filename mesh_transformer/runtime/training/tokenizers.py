"""Compares the tokens of the training data with those of the model from which a fine-tuning starts."""

import contextlib
from collections.abc import Iterator

from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.config import DataConfig
from mesh_transformer.data.records.prepared import Prepared
from mesh_transformer.data.records.sources import find_source, is_text
from mesh_transformer.data.tokens.tokenizer import Tokenizer, load_tokenizer
from mesh_transformer.errors import UserError, set_options
from mesh_transformer.logs import log

# vocabularies of one kind differ in numbers, blanks or other scripts
_TEXTS = (
    "The capital of Norway is Oslo.",
    "def f(x):\n    return x ** 2 + 1234567\n\n\t# 3.14",
    "L'été à Zürich, 東京の夏, лето в Москве 🙂",
)
_SHOWN = 6


def warn_of_other_tokens(data: DataConfig, checkpoint: Checkpoint) -> None:
    """Log a warning for each tokenizer of the training data with which a text has other ids than with the tokenizer of
    `checkpoint`. A tokenizer that is not known, or cannot be read here, is not compared."""
    name = checkpoint.tokenizer.spec
    if name is None or (model := _loaded(name)) is None:
        return
    for other, fingerprint, advice in _of_data(data, name):
        if model.fingerprint == fingerprint or (tokenizer := _loaded(other)) is None:
            continue
        if (text := _first_difference(model, tokenizer)) is not None:
            log.warning(
                "the training data are tokens of %s, and the model was trained on those of %s: the text %r begins with "
                "%s in the former and with %s in the latter, so that the model reads other words; %s",
                *(other, name, text, _ids(tokenizer, text), _ids(model, text), advice),
            )


def _of_data(data: DataConfig, model: str) -> Iterator[tuple[str, str | None, str]]:
    """The tokenizers of the data, other than the model's by name: the name, the fingerprint if it is known, and what to
    do if its ids differ."""
    if data.tokenizer not in (None, model):
        # records stay what they are
        of_texts = all(map(is_text, data.train_files))
        advice = f"{set_options('data.tokenizer=null')} takes the model's tokenizer"
        yield data.tokenizer, None, advice if of_texts else f"make the records again, with --tokenizer {model}"
    for path in data.train_files:
        with contextlib.suppress(UserError):
            prepared = Prepared.beside(find_source(path))
            if prepared.tokenizer not in (None, model, data.tokenizer):
                yield prepared.tokenizer, prepared.fingerprint, f"prepare {path} again, with --tokenizer {model}"


def _loaded(name: str) -> Tokenizer | None:
    try:
        return load_tokenizer(name)
    except UserError:
        return None


def _first_difference(first: Tokenizer, second: Tokenizer) -> str | None:
    if first.fingerprint == second.fingerprint:
        return None
    return next((text for text in _TEXTS if first.encode(text) != second.encode(text)), None)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)[:_SHOWN]
