"""device_serve.py with a fake engine, for tests of the process.

Environment variables:

- FAKE_DELAY: seconds per step.
- FAKE_WARM_UP: seconds of the warm-up.
- FAKE_FAULT: an error while the engine opens ("user error", "crash") or at its 20th step ("late crash").
- FAKE_SEND_BUFFER: size of the sockets' send buffers in bytes.
- FAKE_END: seconds between the message "ending" and the end of the process.
"""

import atexit
import collections
import os
import socket
import sys
import time
from typing import Any

import device_serve
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.config import Config
from mesh_transformer.errors import UserError
from mesh_transformer.infer.program_table import ProgramCounts
from mesh_transformer.runtime import cli
from mesh_transformer.runtime.serving import start
from support.fake_engine import FakeEngine


class Engine(FakeEngine):
    program_counts = ProgramCounts(3, 0)

    def warm_up(self) -> None:
        time.sleep(float(os.environ.get("FAKE_WARM_UP", "0")))

    def compile_rest(self, on_compiled: Any) -> None:
        pass

    def close(self) -> bool:
        return os.environ.get("FAKE_FAULT") != "compiles"

    def generate(self, steps: int) -> Any:
        if self.computed_steps + steps >= 20 and os.environ.get("FAKE_FAULT") == "late crash":
            raise RuntimeError("a device was lost")
        return super().generate(steps)


def open_engine(config: Config, checkpoint: Checkpoint, *, slots: int) -> Engine:
    fault = os.environ.get("FAKE_FAULT")
    if fault == "user error":
        raise UserError(f"no checkpoint in {checkpoint}")
    if fault == "crash":
        raise RuntimeError("a device was lost")
    delay = float(os.environ.get("FAKE_DELAY", "0"))
    engine = Engine(slots=slots, context=config.model.seq, vocab=config.model.n_vocab, delay=delay)
    # do not keep all calls
    engine.calls = collections.deque(maxlen=1)
    return engine


def bind(host: str, port: int) -> socket.socket:
    listener = _bind(host, port)
    if size := os.environ.get("FAKE_SEND_BUFFER"):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, int(size))
    return listener


def end_slowly(seconds: float) -> None:
    sys.stderr.write("ending\n")
    sys.stderr.flush()
    time.sleep(seconds)


if __name__ == "__main__":
    _bind, start.bind = start.bind, bind
    if "FAKE_END" in os.environ:
        atexit.register(end_slowly, float(os.environ["FAKE_END"]))
    cli.run(lambda: device_serve.main(open_engine=open_engine))
