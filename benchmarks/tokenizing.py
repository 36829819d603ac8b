"""Tokens per CPU second of tokenizers and of tiktoken, on the same text, in child processes that run in turn.

python benchmarks/tokenizing.py [--tokenizer FOLDER] [--input PATH] [--characters 4000000] [--rounds 5]

Each child encodes batches of 256 Ki characters in one thread, after a first batch that is not timed. The ids of both
must be equal.
"""

import argparse
import hashlib
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

from common import end, in_turn, median, medians, parse, parser, peak_memory_mib, report

_BATCH_CHARS = 1 << 18


def main() -> None:
    made = parser(__doc__, config=None)
    made.add_argument("--tokenizer", default="gpt2", help="a folder, or a name on the Hugging Face hub")
    made.add_argument("--input", default="data", help="text, as create_finetune_tfrecords.py takes it")
    made.add_argument("--characters", type=int, default=4_000_000, help="characters that are encoded at most")
    arguments = parse(made)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    runs = in_turn(arguments, {name: {"worker": name} for name in ("tokenizers", "fast")})
    ratios = [fast["rate"] / slow["rate"] for fast, slow in zip(runs["fast"], runs["tokenizers"], strict=True)]
    figures = ("rate", "start_seconds", "memory_mib")
    report(
        {
            # million tokens a CPU second; CPU seconds until the first batch; peak of the process
            **{name: medians(results, *figures) for name, results in runs.items()},
            "tokens": runs["fast"][0]["tokens"],
            "ratio": median(ratios),
            "ratios": [round(ratio, 2) for ratio in ratios],
        }
    )
    hashes = {result["sha256"] for results in runs.values() for result in results}
    end(["the ids of tokenizers and of tiktoken"] if len(hashes) > 1 else [])


def tokenizers(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rate of tokenizers, in a child process."""
    from mesh_transformer.data.tokens.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(arguments.tokenizer)
    return _measured(arguments, tokenizer.encode_literal, time.process_time())


def fast(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rate of tiktoken, in a child process.

    Raises:
        RuntimeError: it is not used for this tokenizer.
    """
    from mesh_transformer.data.tokens import fast_encoder
    from mesh_transformer.data.tokens.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(arguments.tokenizer)
    began = time.process_time()
    # start now, and leave out the comparison with the first documents
    fast_encoder._BEFORE_CHARS = fast_encoder._COMPARED_CHARS = 0
    encoder = fast_encoder.LiteralEncoder(tokenizer, threads=1)
    encoder.encode([""])
    if not encoder.fast:
        raise RuntimeError(f"{arguments.tokenizer}: tiktoken is not used for this tokenizer")
    return _measured(arguments, encoder.encode, began)


def _measured(arguments: argparse.Namespace, encode: Any, began: float) -> dict[str, Any]:
    batches = list(_batches(arguments))
    encode(batches[0])
    start, tokens, hashed = time.process_time(), 0, hashlib.sha256()
    seconds = 0.0
    for batch in batches:
        before = time.process_time()
        found = encode(batch)
        seconds += time.process_time() - before
        tokens += sum(map(len, found))
        hashed.update(repr(found).encode())
    return {
        "tokens": tokens,
        "rate": round(tokens / seconds / 1e6, 3),
        "start_seconds": round(start - began, 2),
        "memory_mib": peak_memory_mib(),
        "sha256": hashed.hexdigest(),
    }


def _batches(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Batches of texts, up to the number of characters."""
    from mesh_transformer.data.corpus.pieces import file_pieces, input_files

    pieces = itertools.chain.from_iterable(file_pieces(path, None) for path in input_files(arguments.input))
    batch: list[str] = []
    chars = total = 0
    for piece in pieces:
        batch.append(piece.text)
        chars += len(piece.text)
        if chars >= _BATCH_CHARS:
            yield batch
            total, chars, batch = total + chars, 0, []
            if total >= arguments.characters:
                return
    if batch:
        yield batch


if __name__ == "__main__":
    main()
