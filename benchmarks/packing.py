"""The training step on records of several documents, relative to the step on the same tokens as one text.

    python benchmarks/packing.py

Both steps are in one process and run in turn. The figures are CPU seconds of all threads, which other programs on the
machine change less than they change wall time.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from common import OwnStep, config_of, parse, parser, report

# mean tokens of a document: a quarter of a record of configs/70M.json
DOCUMENT = 128


def main() -> None:
    arguments = parse(parser(__doc__, rounds=10))
    own = OwnStep(config_of(arguments))
    tokens = np.asarray(own.tokens.tokens)
    begins = np.random.default_rng(0).random(tokens.shape) < 1 / DOCUMENT
    documents = 1 + np.cumsum(begins, axis=-1, dtype=np.int32)
    batches = {"concat": own.tokens, "documents": own.session.place_batch(own.tokens._replace(documents=documents))}
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    # the first round compiles
    for _ in range(1 + arguments.rounds):
        for name, batch in batches.items():
            seconds[name].append(cpu_seconds(partial(own, batch)))
    medians = {name: round(statistics.median(values[1:]), 4) for name, values in seconds.items()}
    ratio = round(medians["documents"] / medians["concat"], 3)
    report({"config": arguments.config, "set": arguments.overrides, "cpu_seconds": medians, "ratio": ratio})


def cpu_seconds(step: Callable[[], object]) -> float:
    """CPU seconds of this process in one step."""
    began = time.process_time()
    step()
    return time.process_time() - began


if __name__ == "__main__":
    main()
