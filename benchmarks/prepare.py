"""prepare_dataset.py against its encoder alone and against `datasets.map`, on the same text, in child processes that
run in turn.

python benchmarks/prepare.py [--tokenizer FOLDER] [--megabytes 150] [--rounds 3]

The text is the Python files of this environment, as one .jsonl file. Each row has the tokens a second of the clock and
the million tokens a CPU second of the process and of all processes that it started. The start of Python is not counted,
the start of the workers is. The rows without `fast` run where tiktoken cannot
be imported. The records of all rows of prepare_dataset.py must be equal.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from common import end, in_turn, medians, parse, parser, report

_BATCH_CHARS = 1 << 18
_LONGEST_CHARS = 1_000_000
_PART_MB = 2.0


def main() -> None:
    made = parser(__doc__, config=None, rounds=3)
    made.add_argument("--tokenizer", default="gpt2", help="a folder, or a name on the Hugging Face hub")
    made.add_argument("--megabytes", type=float, default=150.0, help="size of the text")
    arguments = parse(made)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        arguments.text = os.path.join(folder, "text.jsonl")
        size = _write_text(Path(arguments.text), arguments.megabytes * 1e6)
        without = _without_tiktoken(Path(folder))
        rows: dict[str, dict[str, Any]] = {
            "encoder": {"worker": "encoder", "without": without},
            "encoder, fast": {"worker": "encoder", "without": None},
            "1 worker": {"worker": "prepared", "workers": 1, "without": without},
            "1 worker, fast": {"worker": "prepared", "workers": 1, "without": None},
            "2 workers": {"worker": "prepared", "workers": 2, "without": without},
            "2 workers, fast": {"worker": "prepared", "workers": 2, "without": None},
            "4 workers": {"worker": "prepared", "workers": 4, "without": without},
            "datasets.map, 2 processes": {"worker": "mapped", "workers": 2, "without": without},
        }
        runs = in_turn(arguments, rows)
    rows = {name: medians(results, "tokens", "tokens_a_second", "cpu_rate") for name, results in runs.items()}

    def ratio(figure: str, above: str, below: str) -> float:
        return round(rows[above][figure] / rows[below][figure], 2)

    report(
        {
            "megabytes": round(size / 1e6, 1),
            "rows": rows,
            "1 worker to encoder, CPU": ratio("cpu_rate", "1 worker", "encoder"),
            "1 worker to encoder, fast, CPU": ratio("cpu_rate", "1 worker, fast", "encoder, fast"),
            "2 workers to 1, clock": ratio("tokens_a_second", "2 workers", "1 worker"),
            "4 workers to 2, clock": ratio("tokens_a_second", "4 workers", "2 workers"),
            "2 workers to datasets.map, CPU": ratio("cpu_rate", "2 workers", "datasets.map, 2 processes"),
            "2 workers to datasets.map, clock": ratio("tokens_a_second", "2 workers", "datasets.map, 2 processes"),
            "2 workers, fast, to datasets.map, CPU": ratio("cpu_rate", "2 workers, fast", "datasets.map, 2 processes"),
        }
    )
    records = {result["sha256"] for results in runs.values() for result in results if result["sha256"]}
    end(["the records of prepare_dataset.py"] if len(records) > 1 else [])


def encoder(arguments: argparse.Namespace) -> dict[str, Any]:
    """The encoder alone, in one thread, in a child process: its proof before the first text is not counted."""
    _hide_tiktoken(arguments.without)
    from mesh_transformer.data.tokens import fast_encoder
    from mesh_transformer.data.tokens.tokenizer import load_tokenizer

    if arguments.without is None:
        # start now, and leave out the comparison with the first documents
        fast_encoder._BEFORE_CHARS = fast_encoder._COMPARED_CHARS = 0
    made = fast_encoder.LiteralEncoder(load_tokenizer(arguments.tokenizer), threads=1)
    batches = list(_batches(arguments.text))
    made.encode(batches[0])
    with _Measured() as measured:
        measured.tokens = sum(len(ids) for batch in batches for ids in made.encode(batch))
    return measured.result


def prepared(arguments: argparse.Namespace) -> dict[str, Any]:
    """prepare_dataset.py with so many workers, in a child process."""
    _hide_tiktoken(arguments.without)
    from mesh_transformer.dataset.job import prepare
    from mesh_transformer.dataset.options import PrepareOptions
    from mesh_transformer.dataset.tasks import runner

    output = os.path.join(os.path.dirname(arguments.text), "output")
    shutil.rmtree(output, ignore_errors=True)
    with runner(None, arguments.workers) as tasks, _Measured() as measured:
        made = prepare([arguments.text], arguments.tokenizer, output, PrepareOptions(val=0, part_mb=_PART_MB), tasks)
        measured.tokens = made["train"]["tokens"]
    hashed = hashlib.sha256()
    for file in sorted(Path(output).glob("*.tfrecords")):
        hashed.update(file.read_bytes())
    return measured.result | {"sha256": hashed.hexdigest()}


def mapped(arguments: argparse.Namespace) -> dict[str, Any]:
    """`datasets.map` with the same tokenizer in transformers' class, in a child process."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    from mesh_transformer.data.tokens.tokenizer import load_tokenizer

    datasets.disable_progress_bars()
    backend = getattr(load_tokenizer(arguments.tokenizer), "_backend")  # noqa: B009
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)

    def encode(rows: dict[str, list[str]]) -> dict[str, Any]:
        return {"ids": tokenizer(rows["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]}

    cache = os.path.join(os.path.dirname(arguments.text), "cache")
    shutil.rmtree(cache, ignore_errors=True)
    with _Measured() as measured:
        found = datasets.load_dataset("json", data_files=arguments.text, split="train", cache_dir=cache)
        # a batch is as large as ours in the mean
        count = max(1, _BATCH_CHARS * len(found) // os.path.getsize(arguments.text))
        made = found.map(
            encode, batched=True, batch_size=count, num_proc=arguments.workers, remove_columns=found.column_names
        )
        measured.tokens = sum(len(ids) for ids in made.with_format("arrow")["ids"])
    return measured.result


class _Measured:
    """Measures the clock, and the CPU seconds of this process and of those that it started."""

    tokens: int

    def __enter__(self) -> "_Measured":
        self._cpu, self._clock = _cpu_seconds(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        cpu, clock = _cpu_seconds() - self._cpu, time.perf_counter() - self._clock
        self.result = {
            "tokens": self.tokens,
            "tokens_a_second": round(self.tokens / clock),
            "cpu_rate": round(self.tokens / cpu / 1e6, 3),
            "sha256": None,
        }


def _cpu_seconds() -> float:
    total, own = 0.0, psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        # processes that ended and were waited for are in the times of their parents
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _write_text(path: Path, size: float) -> int:
    """Write Python files as documents, up to a size. Returns the size."""
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
            text = source.read_bytes().decode("utf-8", "replace")
            if 0 < len(text) <= _LONGEST_CHARS:
                written += file.write(json.dumps({"text": text}) + "\n")
            if written >= size:
                return written
    return written


def _without_tiktoken(folder: Path) -> str:
    """A folder with a tiktoken that cannot be imported."""
    there = folder / "without"
    there.mkdir()
    (there / "tiktoken.py").write_text('raise ImportError("hidden by benchmarks/prepare.py")\n')
    return str(there)


def _hide_tiktoken(folder: str | None) -> None:
    """Put a folder before all others, for this process and for its workers."""
    if folder is not None:
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = folder + os.pathsep + os.environ.get("PYTHONPATH", "")


def _batches(text: str) -> Iterator[list[str]]:
    """The documents in batches."""
    batch, chars = [], 0
    with open(text, encoding="utf-8") as file:
        for line in file:
            batch.append(json.loads(line)["text"])
            chars += len(batch[-1])
            if chars >= _BATCH_CHARS:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


if __name__ == "__main__":
    main()
