"""A worker process: runs one job in its main thread and tells its agent about it.

The jobs are in the table `JOBS`. All workers of a cluster run the same one, in one mesh.

Its first message is (job, run, worker_id). What it tells, besides {"kind": "alive", "at_work"} every second:
{"kind": "begun", "begun"}, {"kind": "phase", "name", "step"}, {"kind": "metrics", "step", "scalars"}, what
`stream.StreamedFeed` tells, and at last {"kind": "result", "value"} or {"kind": "error", "error"}. What it is told: the
arguments of `StreamedFeed.put`, and "leave".

When its agent dies it saves and ends, as after a SIGTERM.
"""

import contextlib
import dataclasses
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from mesh_transformer import logs
from mesh_transformer.cluster.base import Category, Job, WorkerError
from mesh_transformer.cluster.host import processes as host
from mesh_transformer.cluster.host.stream import StreamedFeed
from mesh_transformer.config import Config, parse_config
from mesh_transformer.errors import RunError, UserError
from mesh_transformer.liveness import Watch
from mesh_transformer.logs import Scalars
from mesh_transformer.runtime.training.observer import Observer

ALIVE_EVERY_S = 1.0
ORPHAN_S = 60.0  # for saving, once nobody is there to tell

_OWN_TYPES: dict[str, Category] = {"CredentialsError": "machine", "UserError": "user", "RunError": "run"}
_MACHINE_TYPES = {"OSError", "EOFError", "MemoryError", "GoogleAPIError", "ClientError"}
_BUG_TYPES = {"TypeError", "AttributeError", "NameError", "ImportError", "LookupError", "AssertionError", "ValueError",
              "ArithmeticError", "NotImplementedError", "SyntaxError"}  # fmt: skip
_OF_A_SERVICE = re.compile(
    r"\W*(UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL|ABORTED|UNKNOWN|CANCELLED|DATA_LOSS|FAILED_PRECONDITION)\b"
)


def main() -> None:
    """Run the job that comes through the inherited pipe whose number is the first argument."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # until the run saves first
    logs.set_up()
    pipe = Connection(int(sys.argv[1]))
    try:
        job, run, worker_id = pipe.recv()
    except (EOFError, OSError):
        sys.exit(1)
    sys.exit(Worker(pipe).run(job, run, worker_id))


class Worker(Observer):
    """The job of this process, and what it tells the agent."""

    shows_progress = True

    def __init__(self, pipe: Connection):
        self._pipe, self._sending = pipe, threading.Lock()
        self._feed: StreamedFeed | None = None
        self._leaving = False

    def run(self, job: Job, run: str, worker_id: int) -> int:
        """Do the job. Returns its exit code; does not return if it failed, for the other processes may hang."""
        for target in (self._listen, self._stay_alive):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()
        try:
            self._lock = host.hold(run, worker_id)
            code, result = run_job(job, self, self._open_feed)
            self._tell({"kind": "result", "value": result})
            self.phase("leave", 0)
            return code
        except Exception as error:  # noqa: BLE001  (told to the agent, whatever it is)
            self._fail(error)

    def _open_feed(self, session: Any) -> Any:
        if session.config.data.read_by == "host":
            return read_here(session)
        self._feed = StreamedFeed(self._tell, session.rows(session.microbatch), session.microbatch)
        if self._leaving:
            self._feed.leave()
        return self._feed

    def begun(self, step: int, total: int, steps_redone: int) -> None:
        import jax

        chips = len({(d.process_index, *getattr(d, "coords", (d.id,))) for d in jax.devices()})
        told = {"step": step, "total": total, "steps_redone": steps_redone, "chips": chips}
        self._tell({"kind": "begun", "begun": told})

    def phase(self, name: str, step: int) -> None:
        self._tell({"kind": "phase", "name": name, "step": step})

    def write(self, step: int, scalars: Scalars) -> None:
        self._tell({"kind": "metrics", "step": step, "scalars": dict(scalars)})

    def _tell(self, event: dict[str, Any]) -> None:
        with self._sending, contextlib.suppress(OSError):  # `_listen` notices too, and ends the run
            self._pipe.send(event)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self._pipe.recv()
                if message == "leave":
                    self._leave()
                elif self._feed is not None:
                    self._feed.put(*message)
        logs.log.warning("the agent of this worker is gone: saving, then ending")
        self._leave()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_S)
        os._exit(1)

    def _leave(self) -> None:
        self._leaving = True
        if self._feed is not None:
            self._feed.leave()

    def _stay_alive(self) -> None:
        watch = Watch()
        while True:
            self._tell({"kind": "alive", "at_work": watch.at_work()})
            time.sleep(ALIVE_EVERY_S)

    def _fail(self, error: Exception) -> NoReturn:
        whose = category([kind.__name__ for kind in type(error).__mro__], str(error))
        expected = isinstance(error, UserError | RunError)
        message = str(error) if expected else f"{type(error).__name__}: {str(error)[:2000]}"
        trace = traceback.format_exc()
        if whose == "machine" and not expected:
            # perhaps only the end of another worker: the driver shows errors, not this
            for line in trace.splitlines():
                logs.log.info("%s", line)
        logs.log.error("%s", trace if whose == "bug" else message)
        self._tell({"kind": "error", "error": WorkerError(whose, message, trace)})
        sys.stderr.flush()
        os._exit(2 if whose == "user" else 1)  # jax's own end would wait for processes that do not come


def category(types: Sequence[str], message: str) -> Category:
    """Whose error an exception is, from the names of its class and its bases.

    `bug` is the user's too: the same program would raise it again. An exception that quotes the status of a service (a
    collective, a storage) is the machine's, and so are credentials that a host lacks.
    """
    if own := next((_OWN_TYPES[name] for name in types if name in _OWN_TYPES), None):
        return own
    names = set(types)
    if names & {"JaxRuntimeError", "XlaRuntimeError"}:
        return "bug" if re.match(r"\W*RESOURCE_EXHAUSTED", message) else "machine"
    of_machine = names & _MACHINE_TYPES or _OF_A_SERVICE.match(message)
    return "bug" if names & _BUG_TYPES and not of_machine else "machine"


OpenFeed = Callable[[Any], Any]  # from a session to the loader of its training batches


def read_here(session: Any) -> Any:
    """The training batches of a session, read by this process."""
    from mesh_transformer.runtime.training.feeds import open_train_feed

    return open_train_feed(session)


def run_job(job: Job, observer: Observer | None = None, open_feed: OpenFeed = read_here) -> tuple[int, Any]:
    """Run a job in this process, on its devices: its exit code, and what it gave, as JSON values, the same in all workers or
    that of worker 0.

    Raises:
        UserError: there is no such job, or it cannot be done with this config.
        RunError: as the job does.
    """
    if job.name not in JOBS:
        raise UserError(f"unknown job {job.name!r}: the known ones are {', '.join(JOBS)}")
    return JOBS[job.name](parse_config(job.config), job.arguments, observer or Observer(), open_feed)


def _train(
    config: Config, arguments: dict[str, Any], observer: Observer, open_feed: OpenFeed
) -> tuple[int, Any]:
    """`arguments`: the fields of `runtime.training.start.Source`. The result: those of its `Ending`."""
    from mesh_transformer.runtime.training import start, trainer

    ending = trainer.train(config, start.Source(**arguments), observer, open_feed)
    return ending.code, ending._asdict()


def _evaluate(config: Config, arguments: dict[str, Any], observer: Observer, _: OpenFeed) -> tuple[int, Any]:
    """`arguments`: the fields of `runtime.evaluation.command.EvalOptions`. The result: those of its `Evaluation`."""
    from mesh_transformer.runtime.evaluation import command

    observer.phase("evaluate", 0)
    options = command.EvalOptions(**{**arguments, "tasks": tuple(arguments["tasks"])})
    return 0, command.evaluate(config, options)._asdict()


def _generate(config: Config, arguments: dict[str, Any], observer: Observer, _: OpenFeed) -> tuple[int, Any]:
    """`arguments`: checkpoint, prompts (texts, or lists of token ids), request. The result: a list of samples a prompt."""
    from mesh_transformer.runtime.sampling import sampler

    observer.phase("generate", 0)
    request = sampler.SampleRequest(**arguments["request"])
    samples_by_prompt = sampler.sample_prompts(config, request, arguments["checkpoint"], arguments["prompts"])
    return 0, [[dataclasses.asdict(sample) for sample in samples] for samples in samples_by_prompt]


JOBS = {"train": _train, "evaluate": _evaluate, "generate": _generate}

if __name__ == "__main__":
    main()
