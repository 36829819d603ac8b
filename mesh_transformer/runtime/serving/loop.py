"""The engine's thread, the exchange of requests and tokens with it, and the metrics for /metrics."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import itertools
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh_transformer.errors import plural
from mesh_transformer.infer.program_table import ProgramCounts
from mesh_transformer.infer.requests import Engine, SamplingParams
from mesh_transformer.infer.scheduler import RequestOutput, Scheduler, SchedulerStats
from mesh_transformer.logs import log
from mesh_transformer.runtime.serving.responses import ApiError, failed, invalid, unavailable

T = TypeVar("T")
ServerState = Literal["warming up", "ok", "draining", "failed"]
_RETRY_WARM_S, _RETRY_FULL_S, _MOST_RETRY_S = 5, 1, 60
_MEASURED_ENDS = 32
Sequences = Iterable[tuple[Sequence[int], SamplingParams]]
"""Prompts of at least one token, with their sampling parameters."""
PREFIX = "mesh_transformer_"
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class WarmEngine(Engine, Protocol):
    """An engine that compiles some of its programs before the first request, and the others beside the requests."""

    def warm_up(self) -> None:
        """Compile what the first request needs."""

    def compile_rest(self, on_compiled: Callable[[], None]) -> None:
        """Start to compile the other programs in another thread, which calls `on_compiled` after each one."""

    @property
    def program_counts(self) -> ProgramCounts:
        """How many programs are compiled and how many will be."""

    def close(self) -> bool:
        """Begin no further compilation. Returns whether none runs."""


class _LiveSequence:
    """An accepted sequence, until it is finished or cancelled."""

    def __init__(self, job: GenerationJob, index: int):
        self.job, self.index = job, index
        self.submitted = time.monotonic()
        # whether it has had a slot
        self.admitted = False
        self.last_token: float | None = None


class _Ends:
    """When the last sequences have ended: so many places became free in so much time."""

    def __init__(self) -> None:
        self._at: collections.deque[float] = collections.deque(maxlen=_MEASURED_ENDS)

    def note(self) -> None:
        """A sequence ends now."""
        self._at.append(time.monotonic())

    def wait_s(self, places: int) -> int:
        """After how many whole seconds so many places will be free."""
        if len(self._at) < 2:
            return _RETRY_FULL_S
        seconds = places * (time.monotonic() - self._at[0]) / len(self._at)
        return min(_MOST_RETRY_S, max(_RETRY_FULL_S, math.ceil(seconds)))


class EngineLoop:
    """Runs the scheduler in its own thread. Call all methods in the thread of the asyncio loop that called `start`.

    A sequence is live from `reserve` until its last output is delivered or it is cancelled. At most `slots + max_queue`
    sequences are live, so at most `max_queue` wait while all slots are in use; where others have
    sequences, `slots` more are for clients of which none waits. The thread reads its inbox in order, so
    the scheduler drops a cancelled sequence before it gets a later one.
    """

    def __init__(self, open_engine: Callable[[], WarmEngine], *, slots: int, max_queue: int, warm: bool = True):
        """`warm`: whether the engine warms up at the start. Otherwise it does at `warm_up`."""
        self.state: ServerState = "warming up"
        self.failure: BaseException | None = None
        # largest number of tokens of a prompt and its completion; 0 until the state is "ok"
        self.context = 0
        self.slots, self.max_queue = slots, max_queue
        self.metrics = Metrics(self._snapshot)
        self._open_engine, self._warm = open_engine, warm
        self._engine: WarmEngine | None = None
        self._inbox: queue.SimpleQueue[Callable[[Scheduler], None] | None] = queue.SimpleQueue()
        # the thread replaces the whole object
        self._stats = SchedulerStats(slots=slots)
        self._live: dict[int, _LiveSequence] = {}
        self._ends = _Ends()
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, which opens and warms up the engine. The event `ended` is set at the end of the thread."""
        self._home = asyncio.get_running_loop()
        self.ended, self._all_finished = asyncio.Event(), asyncio.Event()
        self._all_finished.set()
        self._thread.start()

    async def call(self, work: Callable[[], T]) -> T:
        """The result of `work`, which the engine's thread computes between two steps.

        Raises:
            ApiError: the thread has failed or ended, or does so before it computes this.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run(_: Scheduler) -> None:
            # a caller that was interrupted wants no result
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  (the caller raises it)
                future.set_exception(error)

        self._inbox.put(run)
        result: asyncio.Future[Any] = asyncio.wrap_future(future)
        ended: asyncio.Future[Any] = asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait([result, ended], return_when=asyncio.FIRST_COMPLETED)
            # the thread's last messages come before `ended`
            if not result.done():
                raise failed("the model has failed or was closed")
            value: T = result.result()
            return value
        finally:
            result.cancel()
            ended.cancel()

    async def warm_up(self) -> None:
        """Compile what a first request needs, and then the rest in another thread, if it was not done at the start."""
        if self._engine is not None and not self._warm:
            await self.call(self._engine.warm_up)
            self._warm = True
            self._compile_rest(self._engine)

    def reserve(self, sequences: int, client: Hashable = None) -> GenerationJob:
        """Reserve places for all sequences of a request. `GenerationJob.start` submits the sequences.

        Args:
            client: whose request it is.

        Raises:
            ApiError: 503 during warm-up and draining, and if the queue is full; 400 for more sequences than the queue
                can hold.
        """
        most, live = self.slots + self.max_queue, len(self._live)
        if self.state != "ok":
            code = self.state.replace(" ", "_")
            raise unavailable(f"the server is {self.state}", code=code, retry_after_s=_RETRY_WARM_S)
        if sequences > most:
            raise invalid(f"{sequences} sequences (prompts x n): this server accepts at most {most} at a time")
        others = any(each.job.client != client for each in self._live.values())
        waits = any(each.job.client == client and not each.admitted for each in self._live.values())
        room = most + self.slots if others and not waits else most
        if live + sequences > room:
            message = f"the queue is full: {live} sequences run or wait, and at most {room} can: retry later"
            raise unavailable(message, code="queue_full", retry_after_s=self._ends.wait_s(live + sequences - room))
        job = GenerationJob(self, [next(self._ids) for _ in range(sequences)], client)
        self._live.update((id, _LiveSequence(job, index)) for index, id in enumerate(job.ids))
        self._all_finished.clear()
        return job

    def submit(self, ids: Sequence[int], sequences: Sequences, *, slide: bool) -> None:
        """Submit sequences for the reserved places, see `Scheduler.submit`. Sequences that are cancelled already are
        ignored."""
        for id, (prompt, params) in zip(ids, sequences, strict=True):
            if live := self._live.get(id):
                admitted = partial(self._note_admitted, live)
                client = live.job.client
                self._inbox.put(methodcaller("submit", id, prompt, params, admitted, slide=slide, client=client))

    def cancel(self, ids: Iterable[int]) -> None:
        """Cancel these sequences. Finished and cancelled sequences are ignored."""
        for id in ids:
            if self._forget(id):
                self._inbox.put(methodcaller("cancel", id))

    @property
    def busy(self) -> bool:
        """Whether a sequence runs or waits."""
        return bool(self._live)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait for the live sequences, at most this number of seconds."""
        if self.state != "failed":
            self.state = "draining"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_finished.wait(), seconds)

    def cut_off(self) -> int:
        """Cancel the live sequences and answer their requests with 503. Returns the number of sequences."""
        left = len(self._live)
        self._abort(unavailable("the server is stopping", code="draining", retry_after_s=_RETRY_WARM_S))
        return left

    async def stop(self, seconds: float) -> bool:
        """End the thread after its current step. Returns False if it does not end within `seconds`, as while weights
        are read, or if a program is being compiled."""
        self.end()
        deadline = time.monotonic() + seconds
        try:
            await asyncio.wait_for(self.ended.wait(), seconds)
        except TimeoutError:
            return False
        # the thread frees the engine; Python must not exit during that
        await asyncio.to_thread(self._thread.join, max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive() and self._close_engine()

    def end(self) -> None:
        """End the thread after its current step."""
        self._inbox.put(None)
        self._close_engine()

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread, in any other thread. Whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _close_engine(self) -> bool:
        return self._engine is None or self._engine.close()

    @property
    def program_counts(self) -> ProgramCounts:
        """The programs of the engine; none while weights are read."""
        return ProgramCounts(0, 0) if self._engine is None else self._engine.program_counts

    def _run(self) -> None:
        try:
            engine = self._engine = self._open_engine()
            if self._warm:
                engine.warm_up()
            scheduler = Scheduler(engine, max_queue=self.max_queue + self.slots, clock=time.perf_counter)
            self._stats = scheduler.stats
            self._home.call_soon_threadsafe(self._ready, engine.context)
            if self._warm:
                self._compile_rest(engine)
            self._serve(scheduler)
        except BaseException as error:  # noqa: BLE001  (the waiting requests need a response after any error)
            self._home.call_soon_threadsafe(self._fail, error)
        self._home.call_soon_threadsafe(self.ended.set)

    def _compile_rest(self, engine: WarmEngine) -> None:
        # a message that does nothing: the scheduler looks again whether it can go on
        engine.compile_rest(lambda: self._inbox.put(lambda _: None))

    def _serve(self, scheduler: Scheduler) -> None:
        waits = False
        while True:
            if scheduler.idle or waits or not self._inbox.empty():
                command = self._inbox.get()
                if command is None:
                    return
                command(scheduler)
                waits = False
                continue
            outputs = scheduler.step()
            waits = scheduler.waits
            self._stats = scheduler.stats
            if outputs:
                self._home.call_soon_threadsafe(self._deliver, outputs)

    def _note_admitted(self, live: _LiveSequence) -> None:
        # called in the engine's thread; a histogram has its own lock
        live.admitted = True
        self.metrics.queue_s.observe(time.monotonic() - live.submitted)

    def _ready(self, context: int) -> None:
        self.context = context
        if self.state == "warming up":
            self.state = "ok"
            log.info("ready: %s, context of %d tokens", plural(self.slots, "slot"), context)

    def _fail(self, error: BaseException) -> None:
        self.state, self.failure = "failed", error
        self._abort(failed("the model failed and the server stops"))

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        now = time.monotonic()
        for output in outputs:
            live = self._live.get(output.request)
            # the sequence was cancelled
            if live is None:
                continue
            if output.tokens:
                self._time_tokens(live, len(output.tokens), now)
            live.job.put((live.index, output))
            if output.finish_reason:
                self._forget(output.request)

    def _time_tokens(self, live: _LiveSequence, count: int, now: float) -> None:
        if live.last_token is None:
            self.metrics.first_token_s.observe(now - live.submitted)
        else:
            for _ in range(count):
                self.metrics.between_tokens_s.observe((now - live.last_token) / count)
        live.last_token = now

    def _abort(self, error: ApiError) -> None:
        for job in {live.job for live in self._live.values()}:
            job.put(error)
        self.cancel(list(self._live))

    def _forget(self, id: int) -> bool:
        known = self._live.pop(id, None) is not None
        if known:
            self._ends.note()
        if not self._live:
            self._all_finished.set()
        return known

    def _snapshot(self) -> SchedulerStats:
        """The scheduler's stats, corrected for sequences that it does not have yet or has finished."""
        running = min(self._stats.running, len(self._live))
        return self._stats._replace(running=running, waiting=len(self._live) - running)


class GenerationJob:
    """The sequences of one request. Its exit as a context manager cancels the unfinished ones."""

    def __init__(self, loop: EngineLoop, ids: list[int], client: Hashable):
        self.ids, self.client = ids, client
        self._loop = loop
        self._unfinished = set(range(len(ids)))
        self._outputs: asyncio.Queue[tuple[int, RequestOutput] | ApiError] = asyncio.Queue()

    def __enter__(self) -> GenerationJob:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.cancel(self.ids)

    def start(self, sequences: Sequences, *, slide: bool = False) -> None:
        """Submit one sequence for each reserved place, see `EngineLoop.submit`."""
        self._loop.submit(self.ids, sequences, slide=slide)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the sequence, its next output), until all sequences are finished or cancelled.

        Raises:
            ApiError: the server cannot finish the sequences.
        """
        while self._unfinished:
            item = await self._outputs.get()
            if isinstance(item, ApiError):
                raise item
            index, output = item
            if index not in self._unfinished:
                continue
            if output.finish_reason:
                self._unfinished.discard(index)
            yield item

    def cancel(self, index: int) -> None:
        """Cancel one sequence, such as one whose text has reached a stop text."""
        self._unfinished.discard(index)
        self._loop.cancel([self.ids[index]])

    def put(self, item: tuple[int, RequestOutput] | ApiError) -> None:
        """Add an output or an error. EngineLoop calls it."""
        self._outputs.put_nowait(item)


class Metrics(Collector):
    """The Prometheus registry of the server: the scheduler's stats at each scrape, histograms of times, process
    metrics."""

    def __init__(self, snapshot: Callable[[], SchedulerStats]):
        self._snapshot = snapshot
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.answers = Counter(
            PREFIX + "answers", "Answers by route and status", ["route", "status"], registry=self._registry
        )
        self.queue_s = self._histogram("queue_seconds", "From a request's arrival to its slot")
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token"
        )
        self.between_tokens_s = self._histogram(
            "time_between_tokens_seconds",
            "From a token to the next of its sequence; tokens of one step share its time",
        )

    def exposition(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The scheduler's stats as metrics."""
        now = self._snapshot()
        used = now.cached_tokens / max(1, now.positions)
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for kind, name, text, value in (
            (gauge, "requests_running", "Sequences in a slot", now.running),
            (gauge, "requests_waiting", "Sequences that wait for a slot", now.waiting),
            (gauge, "slots", "Sequences that can run at once", now.slots),
            (gauge, "cache_used_ratio", "Fraction of the cache's positions that hold tokens", used),
            (counter, "prompt_tokens", "Prompt tokens of sequences that got a slot", now.prompt_tokens),
            (counter, "prefilled_tokens", "Prompt tokens that were computed", now.prefilled_tokens),
            (counter, "reused_prompt_tokens", "Prompt tokens that were in the cache", now.reused_tokens),
            (counter, "generated_tokens", "Generated tokens", now.generated_tokens),
        ):
            yield kind(PREFIX + name, text, value=value)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self._registry, buckets=_BUCKETS_S)
