"""A worker process: runs one job in its main thread and reports to its agent.

The table `JOBS` lists the jobs. All workers of a cluster run the same job, in one mesh.

The agent sends (job, run, worker_id) first, then the arguments of `StreamedFeed.put` for each batch, and "drain" at the
end of the run. The worker sends events:

    {"kind": "heartbeat", "at_work"}            every second
    {"kind": "start_point", "start_point"}
    {"kind": "phase", "name", "step"}
    {"kind": "metrics", "step", "scalars"}
    {"kind": "feed", "rows", "microbatch", "state"} and {"kind": "taken", "count"}, by `stream.StreamedFeed`
    {"kind": "result", "value"} or {"kind": "error", "error"}, at the end

When its agent dies, the worker saves and ends, as after SIGTERM.
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

from mesh_transformer import cpu_devices, logs
from mesh_transformer.cluster.base import REPORTED, ErrorCategory, Job, WorkerError
from mesh_transformer.cluster.host import processes
from mesh_transformer.cluster.host.stream import StreamedFeed
from mesh_transformer.config import Config, parse_config
from mesh_transformer.errors import RunError, UserError, out_of_memory
from mesh_transformer.liveness import Watch
from mesh_transformer.logs import Scalars
from mesh_transformer.runtime import cli
from mesh_transformer.runtime.training.observer import Observer
from mesh_transformer.stop_signals import TERMINATIONS

HEARTBEAT_S = 1.0
# time for a worker without an agent to save
ORPHAN_SAVE_S = 60.0

# our own exception types; those of libraries and services are known by name, so that no import is needed
_OWN_TYPES: dict[str, ErrorCategory] = {"CredentialsError": "machine", "UserError": "user", "RunError": "run"}
_MACHINE_TYPES = {"OSError", "EOFError", "MemoryError", "GoogleAPIError", "ClientError"}
_BUG_TYPES = {"TypeError", "AttributeError", "NameError", "ImportError", "LookupError", "AssertionError", "ValueError",
              "ArithmeticError", "NotImplementedError", "SyntaxError"}  # fmt: skip
_SERVICE_STATUS = re.compile(
    r"\W*(UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL|ABORTED|UNKNOWN|CANCELLED|DATA_LOSS|FAILED_PRECONDITION)\b"
)


def main() -> None:
    """Run the job that arrives through the inherited pipe. The first argument is the file descriptor of the pipe."""
    cli.collect_rarely()
    cpu_devices.give_threads()
    # until the run installs its own handler, which saves first
    for number in TERMINATIONS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    logs.set_up()
    pipe = Connection(int(sys.argv[1]))
    try:
        job, run, worker_id = pipe.recv()
    except (EOFError, OSError):
        sys.exit(1)
    sys.exit(Worker(pipe).run(job, run, worker_id))


class Worker(Observer):
    """Runs the job of this process and reports to the agent."""

    shows_progress = True

    def __init__(self, pipe: Connection):
        self._pipe, self._sending = pipe, threading.Lock()
        self._feed: StreamedFeed | None = None
        self._draining = False

    def run(self, job: Job, run: str, worker_id: int) -> int:
        """Run the job. Returns its exit code. After an error it ends the process, because the other processes may
        hang."""
        for target in (self._listen, self._send_heartbeats):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()
        try:
            self._lock = processes.lock_worker(run, worker_id)
            code, result = run_job(job, self, self._open_feed)
            self._send({"kind": "result", "value": result})
            self.phase("finish", 0)
            return code
        except Exception as error:  # noqa: BLE001  (reported to the agent)
            self._report(error)

    def _open_feed(self, session: Any) -> Any:
        if session.config.data.read_by == "host":
            return read_in_process(session)
        self._feed = StreamedFeed(self._send, session.rows(session.microbatch), session.microbatch)
        if self._draining:
            self._feed.drain()
        return self._feed

    def started(self, step: int, total: int, steps_redone: int) -> None:
        import jax

        chips = len({(d.process_index, *getattr(d, "coords", (d.id,))) for d in jax.devices()})
        start_point = {"step": step, "total": total, "steps_redone": steps_redone, "chips": chips}
        self._send({"kind": "start_point", "start_point": start_point})

    def phase(self, name: str, step: int) -> None:
        self._send({"kind": "phase", "name": name, "step": step})

    def write(self, step: int, scalars: Scalars) -> None:
        self._send({"kind": "metrics", "step": step, "scalars": dict(scalars)})

    def _send(self, event: dict[str, Any]) -> None:
        # if the agent is gone, `_listen` ends the run
        with self._sending, contextlib.suppress(OSError):
            self._pipe.send(event)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self._pipe.recv()
                if message == "drain":
                    self._drain()
                elif self._feed is not None:
                    self._feed.put(*message)
        logs.log.warning("the agent of this worker is gone: the worker saves and ends")
        self._drain()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_SAVE_S)
        os._exit(1)

    def _drain(self) -> None:
        self._draining = True
        if self._feed is not None:
            self._feed.drain()

    def _send_heartbeats(self) -> None:
        watch = Watch()
        while True:
            self._send({"kind": "heartbeat", "at_work": watch.at_work()})
            time.sleep(HEARTBEAT_S)

    def _report(self, error: Exception) -> NoReturn:
        # on the host it may pass with the other processes of the machine, on a device it does not
        if not isinstance(error, MemoryError):
            error = out_of_memory(error) or error
        error_category = category([base.__name__ for base in type(error).__mro__], str(error))
        expected = isinstance(error, UserError | RunError)
        message = str(error) if expected else f"{type(error).__name__}: {str(error)[:2000]}"
        trace = traceback.format_exc()
        for line in (message if expected else trace).splitlines():
            logs.log.error("%s%s", REPORTED, line)
        self._send({"kind": "error", "error": WorkerError(error_category, message, trace)})
        sys.stderr.flush()
        # the normal end of jax would wait for the other processes
        os._exit(2 if error_category == "user" else 1)


def category(types: Sequence[str], message: str) -> ErrorCategory:
    """The category of an exception.

    A bug counts as an error of the user, because it would occur again. An exception with the status of a service (a
    collective, a bucket) is an error of the machine, and so are missing credentials of a host.

    Args:
        types: the names of its class and of the bases of this class.
    """
    if own_category := next((_OWN_TYPES[name] for name in types if name in _OWN_TYPES), None):
        return own_category
    names = set(types)
    machine = names & _MACHINE_TYPES or _SERVICE_STATUS.match(message)
    return "bug" if names & _BUG_TYPES and not machine else "machine"


# returns the loader of the training batches of a session
OpenFeed = Callable[[Any], Any]


def read_in_process(session: Any) -> Any:
    """A loader of the training batches of a session that reads in this process."""
    from mesh_transformer.runtime.training.feeds import open_train_feed

    return open_train_feed(session)


def run_job(job: Job, observer: Observer | None = None, open_feed: OpenFeed = read_in_process) -> tuple[int, Any]:
    """Run a job in this process, on its devices.

    Returns:
        Its exit code, and its result as JSON values. Only the result of worker 0 is used.

    Raises:
        UserError: there is no such job, or the config does not fit it.
        RunError: the job failed.
    """
    if job.name not in JOBS:
        raise UserError(f"unknown job {job.name!r}: the jobs are {', '.join(JOBS)}")
    return JOBS[job.name](parse_config(job.config), job.arguments, observer or Observer(), open_feed)


def _train(config: Config, arguments: dict[str, Any], observer: Observer, open_feed: OpenFeed) -> tuple[int, Any]:
    """`arguments` has the fields of `runtime.training.start.TuningSource`, the result those of `TrainingResult`."""
    from mesh_transformer.runtime.training import start, trainer

    result = trainer.train(config, start.TuningSource(**arguments), observer, open_feed)
    return result.code, result._asdict()


def _evaluate(config: Config, arguments: dict[str, Any], observer: Observer, _: OpenFeed) -> tuple[int, Any]:
    """`arguments` has the fields of `runtime.evaluation.command.EvalOptions`, the result those of `Evaluation`."""
    from mesh_transformer.runtime.evaluation import command

    observer.phase("evaluate", 0)
    options = command.EvalOptions(**{**arguments, "tasks": tuple(arguments["tasks"])})
    return 0, command.evaluate(config, options)._asdict()


def _generate(config: Config, arguments: dict[str, Any], observer: Observer, _: OpenFeed) -> tuple[int, Any]:
    """`arguments` has checkpoint, prompts (texts, or lists of token IDs) and request. The result is a list of samples
    for each prompt."""
    from mesh_transformer.runtime.sampling import sampler

    observer.phase("generate", 0)
    request = sampler.SampleRequest(**arguments["request"])
    samples_by_prompt = sampler.sample_prompts(config, request, arguments["checkpoint"], arguments["prompts"])
    return 0, [[dataclasses.asdict(sample) for sample in samples] for samples in samples_by_prompt]


JOBS = {"train": _train, "evaluate": _evaluate, "generate": _generate}

if __name__ == "__main__":
    main()
