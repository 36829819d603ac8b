"""What lies beside records: the offsets, index files and manifest.json; mixtures, and their stored positions."""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
from support.mutations import mutated_bytes, mutated_json

from fuzz.harness import Attempt
from mesh_transformer.commands import prepare
from mesh_transformer.config import parse_config
from mesh_transformer.data.batches.loader import make_train_loader
from mesh_transformer.data.records.record_set import RecordSet
from mesh_transformer.data.records.sources import record_files
from mesh_transformer.data.records.text_counts import counts_of_index
from mesh_transformer.data.records.tfrecords import write_records
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.new import data_set

ROWS = [np.full(5, k) for k in range(12)]
MODEL = {"layers": 1, "d_model": 8, "n_heads": 1, "n_vocab": 99, "seq": 4}
PLACES = [0, 1, 15, 16, 40, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """The user's cache folder is in `folder`."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        yield


def value_of(text: bytes) -> Any:
    """The value of a JSON text. The readers of configs and checkpoints have their own fuzzers."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError("not JSON") from error


@contextmanager
def offsets(folder: Path) -> Iterator[Attempt]:
    """Opens records with mutated offsets beside them, and reads all: those that are not refused are the right ones."""
    path = folder / "a.tfrecords"
    write_records(str(path), ROWS)
    size = path.stat().st_size // len(ROWS)
    right = [number * size for number in range(len(ROWS))]

    def mutated(random: Random) -> bytes:
        places = list(right)
        for _ in range(random.choice([1, 1, 2])):
            at = random.randrange(len(places))
            match random.choice(["set", "near", "delete", "insert", "swap"]):
                case "set":
                    places[at] = random.choice(PLACES)
                case "near":
                    places[at] = abs(places[at] + random.choice([-1, 1, -size, size]))
                case "delete":
                    places[at:] = places[at + 1 :] or [0]
                case "insert":
                    places.insert(at, random.choice([*PLACES, *right]))
                case "swap":
                    places[at], places[0] = places[0], places[at]
        return b"".join((place % 2**64).to_bytes(8, "little") for place in places)

    def attempt(random: Random) -> str:
        content = mutated_bytes(random, np.array(right, "<u8").tobytes()) if random.random() < 0.3 else mutated(random)
        Path(f"{path}.offsets").write_bytes(content)
        with contextlib.closing(RecordSet([str(path)])) as records:
            tokens = [record.example().tokens for record in records.read(range(len(records)))]
        assert np.array_equal(tokens, ROWS)
        return "read"

    with cache_in(folder):
        yield attempt


@contextmanager
def indexes(folder: Path) -> Iterator[Attempt]:
    """Finds the record files of an index file, and trains on them."""
    for name in "abc":
        write_records(str(folder / f"{name}.tfrecords"), ROWS)
    index = folder / "train.index"
    seeds = [
        b"a.tfrecords\nb.tfrecords\nc.tfrecords\n",
        b"\xef\xbb\xbfa.tfrecords\r\n\r\n  b.tfrecords",
        b"a.tfrecords",
    ]

    def attempt(random: Random) -> str:
        index.write_bytes(mutated_bytes(random, random.choice(seeds)))
        count = len(record_files(str(index)))
        next(make_train_loader(str(index), seq=4, batch=1, rows=range(1), prefetch=0))
        return f"{min(count, 3)} files"

    with cache_in(folder):
        yield attempt


@contextmanager
def data_manifests(folder: Path) -> Iterator[Attempt]:
    """Makes a data set whose manifest.json, or the note of a job that was cut off, has changed; counts its text, and
    makes a config for it."""
    (folder / "a.txt").write_text("some text " * 40)
    output = folder / "set"
    command = ["--input", str(folder / "a.txt"), "--tokenizer", "bytes", "--output", str(output), "--seq", "8"]
    command += ["--workers", "1", "--val", "0"]

    def make() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            prepare.main(command)

    make()
    manifest, job = output / "manifest.json", output / "work" / "job.json"
    documents = {path: json.loads(manifest.read_text()) for path in (manifest, job)}
    job.parent.mkdir()

    def attempt(random: Random) -> str:
        changed = random.choice(list(documents))
        manifest.unlink(missing_ok=True)
        job.parent.mkdir(exist_ok=True)
        changed.write_bytes(mutated_json(random, documents[changed]))
        counts_of_index(str(output / "train.index"))
        data_set.find(str(output))
        make()
        return "made"

    with cache_in(folder):
        yield attempt


@contextmanager
def mixtures(folder: Path) -> Iterator[Attempt]:
    """Parses a config with a mixture and takes two steps of it, or goes on from a stored position."""
    for name in ("code", "web"):
        write_records(str(folder / f"{name}.tfrecords"), ROWS)
    sources: dict[str, Any] = {
        "code": {"set": str(folder / "code.tfrecords"), "weight": {"0": 0.7, "2": 0.1}},
        "web": {"set": str(folder / "web.tfrecords"), "weight": 0.3, "epochs": 2, "after_epochs": "end_run"},
    }

    def loader(given: Any) -> Any:
        train_set = parse_config({"model": MODEL, "data": {"train_set": given}}).data.train_set
        assert isinstance(train_set, dict)
        return make_train_loader(train_set, seq=4, batch=2, rows=range(2), shuffle="whole", prefetch=0)

    with cache_in(folder):
        whole = loader(sources)
        next(whole)
        position = whole.get_state()

        def attempt(random: Random) -> str:
            if random.random() < 0.5:
                made = loader(sources)
                made.set_state(value_of(mutated_json(random, position)))
                kind = "gone on"
            else:
                given = value_of(mutated_json(random, sources))
                made = loader(given if isinstance(given, dict) else {"a": given})
                kind = "begun"
            next(made, None)
            return kind

        yield attempt
