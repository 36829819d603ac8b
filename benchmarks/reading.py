"""Training records per CPU second: one set in the order of its files, and a mixture that is read at random.

python benchmarks/reading.py [--records 4000] [--seq 2048] [--rounds 5]

Each child makes batches of 64 rows from the same files, without reading ahead, after one batch that is not timed.
"""

import argparse
import os
import tempfile
import time
from typing import Any

import numpy as np
from common import in_turn, median, medians, parse, parser, report

BATCH, FILES = 64, 4


def main() -> None:
    made = parser(__doc__, config=None)
    made.add_argument("--records", type=int, default=4000, help="records that are read, and that the files have")
    made.add_argument("--seq", type=int, default=2048)
    arguments = parse(made)
    with tempfile.TemporaryDirectory() as folder:
        # the offsets of the records
        os.environ["XDG_CACHE_HOME"] = folder
        arguments.folder = folder
        _write(arguments)
        runs = in_turn(arguments, {name: {"worker": name} for name in ("in_order", "at_random")})
    ratios = [b["rate"] / a["rate"] for a, b in zip(runs["in_order"], runs["at_random"], strict=True)]
    # records a CPU second
    figures = {name: medians(results, "rate") for name, results in runs.items()}
    report({**figures, "ratio": median(ratios), "ratios": [round(ratio, 2) for ratio in ratios]})


def in_order(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rate of one set, in a child process."""
    from mesh_transformer.data.batches.loader import make_train_loader

    options = _options(arguments)
    return _measured(arguments, make_train_loader(f"{arguments.folder}/all.index", batch_across_files=True, **options))


def at_random(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rate of a mixture of two sources, each with half of the files, in a child process."""
    from mesh_transformer.config.mixture import TrainSource
    from mesh_transformer.data.batches.loader import make_train_loader

    weights = {"a": {0: 0.7}, "b": {0: 0.3}}
    sources = {
        name: TrainSource(set=f"{arguments.folder}/{name}.index", weight=weight) for name, weight in weights.items()
    }
    return _measured(arguments, make_train_loader(sources, shuffle="whole", **_options(arguments)))


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"seq": arguments.seq, "batch": BATCH, "rows": range(BATCH), "n_vocab": 50257, "prefetch": 0}


def _measured(arguments: argparse.Namespace, loader: Any) -> dict[str, Any]:
    next(loader)
    batches = arguments.records // BATCH
    began = time.process_time()
    for _ in range(batches):
        next(loader)
    return {"rate": round(batches * BATCH / (time.process_time() - began))}


def _write(arguments: argparse.Namespace) -> None:
    """Record files of random tokens, and the indexes `all`, `a` and `b`."""
    from mesh_transformer.data.records.tfrecords import write_records

    draw, names = np.random.default_rng(0), [f"{number}.tfrecords" for number in range(FILES)]
    for name in names:
        rows = (draw.integers(0, 50257, arguments.seq + 1) for _ in range(arguments.records // FILES))
        write_records(f"{arguments.folder}/{name}", rows)
    for index, some in {"all": names, "a": names[: FILES // 2], "b": names[FILES // 2 :]}.items():
        with open(f"{arguments.folder}/{index}.index", "w", encoding="utf-8") as file:
            file.write("\n".join(some))


if __name__ == "__main__":
    main()
