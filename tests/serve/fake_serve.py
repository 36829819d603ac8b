"""device_serve.py with an engine whose tokens are arithmetic: a process for the tests to load, signal and break.

FAKE_DELAY: seconds of a step. FAKE_WARM_UP: seconds of the warm-up. FAKE_FAULT: what the engine does instead of
opening ("user error", "crash").
"""

from __future__ import annotations

import collections
import os
import time

from infer.fake_engine import FakeEngine

import device_serve
from mesh_transformer.config import Config
from mesh_transformer.errors import UserError
from mesh_transformer.runtime import cli


class Engine(FakeEngine):
    def warm_up(self) -> None:
        time.sleep(float(os.environ.get("FAKE_WARM_UP", "0")))


def open_engine(config: Config, checkpoint: str, *, slots: int) -> Engine:
    fault = os.environ.get("FAKE_FAULT")
    if fault == "user error":
        raise UserError(f"no checkpoint in {checkpoint}")
    if fault == "crash":
        raise RuntimeError("a device was lost")
    delay = float(os.environ.get("FAKE_DELAY", "0"))
    engine = Engine(slots=slots, context=config.model.seq, vocab=config.model.n_vocab, delay=delay)
    engine.calls = collections.deque(maxlen=1)  # the list of all calls would grow
    return engine


if __name__ == "__main__":
    cli.run(lambda: device_serve.main(open_engine))
