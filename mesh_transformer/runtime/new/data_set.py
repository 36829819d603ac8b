"""The files, the length and the vocabulary of a data set, as far as they are known before a run."""

import os
from typing import NamedTuple

from mesh_transformer import files
from mesh_transformer.data.records.prepared import Prepared
from mesh_transformer.data.records.sources import find_source, is_text, record_files
from mesh_transformer.data.records.tfrecords import RecordReader
from mesh_transformer.environment import SHIPPED
from mesh_transformer.errors import UserError

# the training data of a folder, the first that exists
TRAIN = ("train.index", "train.txt")
# approximately, for English text with GPT-2's tokenizer
BYTES_PER_TOKEN = 4.0


class DataSet(NamedTuple):
    """A data set.

    Args:
        path: data.train_set.
        val_path: the validation set beside it; None: there is none.
        text: whether it is a text that the run tokenizes.
        n_bytes: size of the text or of the record files; None: they are remote.
        record_tokens: tokens of a record, which is one longer than a sequence; None: a text.
        record_bytes: size of the first record.
        n_vocab: size of the vocabulary, from manifest.json; None: unknown.
        counted: number of training tokens, from manifest.json; None: unknown.
        tokenizer: from manifest.json; None: unknown.
    """

    path: str
    val_path: str | None
    text: bool
    n_bytes: int | None
    record_tokens: int | None = None
    record_bytes: int | None = None
    n_vocab: int | None = None
    counted: int | None = None
    tokenizer: str | None = None

    def tokens(self, bytes_per_token: float) -> float | None:
        """The approximate number of tokens; None: unknown. `bytes_per_token` holds for a text."""
        if self.counted is not None:
            return self.counted
        if self.n_bytes is None:
            return None
        if self.record_tokens is None or not self.record_bytes:
            return self.n_bytes / bytes_per_token
        return self.n_bytes / self.record_bytes * (self.record_tokens - 1)


def find(answer: str) -> DataSet:
    """The data set at a path: a file of `data.train_set`, or the folder of a data set.

    Raises:
        UserError: it does not exist, or its first record cannot be read.
    """
    if answer.startswith("hf://"):
        raise UserError(
            f"data {answer}: prepare it first, mesh-transformer prepare --input {answer} --output DIR, and give DIR"
        )
    path = find_source(_inside(answer) or answer)
    val_path = _validation(path)
    if is_text(path):
        return DataSet(path, val_path, True, None if files.is_remote(path) else os.path.getsize(path))
    records = record_files(path)
    with RecordReader(records[0]) as reader:
        record, plain = reader.read(), reader.plain
    if record is None:
        raise UserError(f"{records[0]} holds no record: give a data set with one record or more")
    local = plain and not any(map(files.is_remote, records))
    prepared = Prepared.beside(path)
    return DataSet(
        path,
        val_path,
        False,
        sum(map(os.path.getsize, records)) if local else None,
        len(record.example().tokens),
        reader.offset,
        prepared.n_vocab,
        prepared.tokens,
        prepared.tokenizer,
    )


def _inside(folder: str) -> str | None:
    """The training data of a local folder, which may be under data/, or of a data set that comes with the project."""
    places = (folder, os.path.join("data", folder), os.path.join(SHIPPED, "data", folder))
    paths = (os.path.join(place, name) for place in places for name in TRAIN)
    return next(filter(os.path.isfile, paths), None)


def _validation(path: str) -> str | None:
    """The file with `val` in the place of `train` in its name."""
    folder, name = os.path.split(path)
    other = files.join(folder, name.replace("train", "val"))
    return other if other != path and files.exists(other) else None
