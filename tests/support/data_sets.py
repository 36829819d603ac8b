"""A corpus of documents that a test knows, and what a data set of it holds."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.dataset.job import prepare
from mesh_transformer.dataset.options import PrepareOptions
from mesh_transformer.dataset.tasks import InProcess, Runner
from mesh_transformer.dataset.worker import Task
from support.loading import read_records

SEQ = 32
# small parts and shards, so that there are many
SIZES: dict[str, Any] = {"seq": SEQ, "part_mb": 0.01, "shard_tokens": 20_000}
EOT = 256


class Corpus(NamedTuple):
    """A folder with files, and the documents in input order, with repeated ones and without empty ones."""

    folder: Path
    documents: list[str]


def write_corpus(folder: Path, seed: int = 0, documents: int = 300) -> Corpus:
    """A .jsonl file with lines that are not documents and with repeated documents, two .txt files, a .parquet file of
    several row groups and a .jsonl.zst file."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgé日\U0001f600", k=draw.randint(1, 8))) for _ in range(200)]
    texts = [" ".join(draw.choices(words, k=int(draw.lognormvariate(3, 1)) + 1)) for _ in range(documents)]
    for repeated in range(0, documents // 2, 10):
        texts[documents - 1 - repeated] = texts[repeated]
    folder.mkdir(parents=True)
    lines = [json.dumps({"text": text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(texts)]
    lines[5:5] = ['{"text": ""}', '{"text": null}', '{"text": ""}']
    (folder / "a.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    files = [texts[0], " ".join(texts)]
    for number, text in enumerate(files):
        (folder / f"b{number}.txt").write_text(text, encoding="utf-8")
    rows, packed = [f"{text} in a row" for text in texts[:40]], [f"{text} in a line" for text in texts[20:60]]
    table = pyarrow.table({"id": range(len(rows)), "text": rows})
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=8)
    content = "".join(json.dumps({"text": text}) + "\n" for text in packed)
    (folder / "d.jsonl.zst").write_bytes(zstandard.compress(content.encode()))
    return Corpus(folder, [*texts, *files, *rows, *packed])


def made(corpus: Path | str, output: Path | str, runner: Runner | None = None, **options: Any) -> dict[str, Any]:
    """Make a data set of byte tokens in this process. Returns the manifest."""
    specs = [corpus] if isinstance(corpus, str) else [str(corpus)]
    return prepare(specs, "bytes", str(output), PrepareOptions(**{**SIZES, **options}), runner or InProcess())


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder and below, by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tokens_of(folder: Path, side: str) -> np.ndarray:
    """All tokens of a side, in the order of the index file."""
    index = folder / f"{side}.index"
    records = [read_records(str(folder / name)) for name in index.read_text().split()] if index.exists() else []
    return np.concatenate([np.zeros(0, np.int32), *(record for file in records for record in file)])


def documents_of(tokens: Sequence[int]) -> Iterator[str]:
    """The texts of byte tokens, without one that is cut at the end."""
    array = np.asarray(tokens)
    *parts, _ = np.split(array, np.flatnonzero(array == EOT) + 1)
    yield from (part[:-1].astype(np.uint8).tobytes().decode() for part in parts)


class Interrupted(Exception):
    """The runner of a test has stopped."""


class Counting:
    """Runs tasks in this process, notes the objects that they write, and stops after the object `stop`."""

    def __init__(self, stop: str | None = None):
        self.names: list[str] = []
        self._stop = stop

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        for number, result in InProcess().run(tasks):
            self.names.append(str(tasks[number].arguments[0]).rpartition("/")[2])
            yield number, result
            if self.names[-1] == self._stop:
                raise Interrupted
