"""The programs of a server's engine: which are compiled before it serves, which one does the work of another, and who
waits for one that is missing."""

import collections
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest
from support.builders import TINY, program
from support.engines import CASES, SAMPLED, complete, prompt_of
from support.waiting import LONG_S, until

from mesh_transformer.infer.program_table import CompileThread, Generate, Prefill, Program
from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.infer.scheduler import Scheduler
from mesh_transformer.ops.attend import storage
from mesh_transformer.ops.attend.storage import Scattered
from mesh_transformer.runtime.session.engine import ServingEngine

CHUNK = 32


@pytest.fixture
def any_length() -> None:
    """As on a CPU, where a program reads as many positions as it needs."""


@pytest.fixture(autouse=True)
def fixed_lengths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where each program reads a fixed number of positions, so that there are many."""
    if "any_length" not in request.fixturenames:
        monkeypatch.setitem(storage._STORAGES, "cpu", Scattered())


@functools.cache
def tiny() -> tuple[Any, Any]:
    run = program(TINY, "mesh.tp=1", "model.seq=512")
    return run.placement.for_decoding(), run.init(jax.random.key(3)).params


class HeldEngine(ServingEngine):
    """Its other thread compiles a program when the test has named it."""

    def __init__(self) -> None:
        super().__init__(*tiny(), slots=3, max_prefill_tokens=CHUNK)
        self.named: set[Program] = set()
        self.change = threading.Condition()
        # in the order in which they were begun
        self.begun: list[Program] = []

    def compile(self, program: Program) -> None:
        if threading.current_thread().name == "compile":
            self.begun.append(program)
            with self.change:
                assert self.change.wait_for(lambda: program in self.named, LONG_S)
        super().compile(program)

    def name(self, *programs: Program) -> None:
        with self.change:
            self.named.update(programs)
            self.change.notify()
        until(lambda: set(programs) <= self.compiled.keys())


class Run:
    """A scheduler on an engine whose other programs are missing."""

    def __init__(self) -> None:
        self.engine = HeldEngine()
        self.engine.warm_up()
        self.engine.compile_rest(lambda: None)
        self.scheduler = Scheduler(self.engine, max_queue=8)
        self.ids: dict[int, list[int]] = collections.defaultdict(list)
        self.finished: set[int] = set()

    def submit(self, request: int, prompt: list[int], sampling: SamplingParams) -> None:
        self.scheduler.submit(request, prompt, sampling)

    def steps(self, until_finished: Callable[[], bool] = lambda: False) -> None:
        """Run steps until nothing can be done."""
        while not self.scheduler.idle and not until_finished():
            for output in self.scheduler.step():
                self.ids[output.request] += [token.id for token in output.tokens]
                if output.finish_reason:
                    self.finished.add(output.request)
            if self.scheduler.waits:
                return


@pytest.fixture
def run() -> Any:
    made = Run()
    yield made
    made.engine.close()
    made.engine.name(*made.engine.begun)


def alone(prompt: list[int], sampling: SamplingParams) -> list[int]:
    placement, params = tiny()
    return complete(ServingEngine(placement, params, slots=1), [(prompt, sampling)])[0].ids


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0)


def test_a_server_compiles_two_programs_and_then_the_others() -> None:
    """All but the scored ones, each once; a request compiles none."""
    engine = ServingEngine(*tiny(), slots=3, max_prefill_tokens=CHUNK)
    assert engine.program_counts == (0, 2)
    engine.warm_up()
    assert set(engine.compiled) == {Prefill(1, 32, 32), Generate(False, 256)}
    assert engine.program_counts == (2, 0)
    names: list[str] = []
    engine.compile_rest(lambda: names.append(threading.current_thread().name))
    until(lambda: engine.program_counts.compiling == 0)
    assert list(engine.compiled)[2:] == engine.programs()[2:]
    assert len(set(engine.programs())) == len(engine.programs()) == 2 + len(names)
    assert set(names) == {"compile"}
    before = dict(engine.compiled)
    complete(engine, [(prompt_of(1, 21), SAMPLED), (prompt_of(2, 300), CASES["2-grams"])])
    complete(engine, [(prompt_of(1, 21), CASES["bias"])])
    assert engine.compiled == before
    assert engine.close()


@pytest.mark.usefixtures("any_length")
def test_a_cpu_needs_nine_programs_for_all_lengths() -> None:
    """A short chunk, powers of two and the longest one, most of them for several prompts too; one slot and all."""
    run = program(TINY, "mesh.tp=1", "model.seq=1024")
    engine = ServingEngine(run.placement.for_decoding(), run.init(jax.random.key(3)).params, slots=4)
    chunks = {Prefill(1, size, 1024) for size in (32, 128, 256, 512)}
    together = {Prefill(4, 32, 1024), Prefill(4, 128, 1024), Prefill(2, 256, 1024)}
    generators = [Generate(single=False, length=1024), Generate(single=True, length=1024)]
    assert engine.first_programs() == [Prefill(1, 128, 1024), generators[0]]
    assert set(engine.programs()) == {*chunks, *together, *generators}
    assert len(engine.programs()) == 9


def test_chats_go_on_while_others_wait_for_their_programs(run: Run) -> None:
    long, short, third = prompt_of(1, 50), prompt_of(2, 20), prompt_of(3, 25)
    run.submit(0, long, greedy(5))
    run.submit(1, short, greedy(9))
    run.steps()
    # the first chunk of the long prompt was computed: its second one needs a later chunk's program
    assert run.finished == {1}
    run.submit(2, third, greedy(6))
    run.steps()
    assert run.finished == {1, 2}
    until(lambda: len(run.engine.begun) == 1)
    run.engine.name(run.engine.begun[0])
    # the missing program is the next one, before those that come first in the order
    until(lambda: len(run.engine.begun) == 2)
    assert run.engine.begun[1] == Prefill(1, CHUNK, 256)
    run.engine.name(Prefill(1, CHUNK, 256))
    run.steps()
    assert run.finished == {0, 1, 2}
    assert run.ids == {0: alone(long, greedy(5)), 1: alone(short, greedy(9)), 2: alone(third, greedy(6))}


def test_a_prompt_starts_anew_where_the_program_of_its_end_is_missing(run: Run) -> None:
    prompt = prompt_of(4, 16)
    run.submit(0, prompt, greedy(4))
    run.steps()
    turn = prompt + run.ids[0] + prompt_of(5, 6)
    run.submit(1, turn, greedy(4))
    run.steps()
    assert run.finished == {0, 1}
    assert run.scheduler.stats.reused_tokens == 0
    assert run.ids[1] == alone(turn, greedy(4))
    run.engine.name(*run.engine.begun, Prefill(1, CHUNK, 256), Generate(False, 512))
    run.submit(2, turn + run.ids[1] + [7], greedy(4))
    run.steps()
    assert run.scheduler.stats.reused_tokens > 20


def test_a_chat_that_outgrows_the_programs_waits_and_shorter_ones_do_not(run: Run) -> None:
    prompt, short, sampling = prompt_of(6, 20), prompt_of(7, 20), greedy(250)
    run.engine.name(Generate(True, 256))
    run.submit(0, prompt, sampling)
    run.steps()
    assert 200 < len(run.ids[0]) < 250
    run.submit(1, short, greedy(30))
    run.steps()
    assert run.finished == {1}
    # the other one waits for the program of one slot, or of all, with the whole context
    until(lambda: len(run.engine.begun) == 2)
    run.engine.name(run.engine.begun[1])
    assert run.engine.begun[1].length == 512
    run.steps()
    assert run.finished == {0, 1}
    assert run.ids == {0: alone(prompt, sampling), 1: alone(short, greedy(30))}


def test_scored_programs_wait_for_a_request(run: Run) -> None:
    sampling = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
    run.submit(0, prompt_of(8, 12), sampling)
    run.steps()
    assert not run.ids
    run.engine.name(*run.engine.programs(), Prefill(1, CHUNK, 512, scored=True))
    run.steps()
    assert run.finished == {0}


def test_a_program_that_cannot_be_compiled_fails_the_engine() -> None:
    class Broken(ServingEngine):
        def compile(self, program: Program) -> None:
            if threading.current_thread().name == "compile":
                raise RuntimeError("no memory")
            super().compile(program)

    engine = Broken(*tiny(), slots=1, max_prefill_tokens=CHUNK)
    engine.warm_up()
    told = threading.Event()
    engine.compile_rest(told.set)
    assert told.wait(LONG_S)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.ready(0, 5, False)
    assert engine.close()


def test_the_end_does_not_wait_for_a_compilation() -> None:
    held, begun = threading.Event(), threading.Event()

    def compile(_: Program) -> None:
        begun.set()
        held.wait(LONG_S)

    thread = CompileThread(compile, [Generate(True, 256), Generate(True, 512)], lambda: None)
    thread.start()
    assert begun.wait(LONG_S)
    assert thread.left == 2
    assert not thread.close()
    held.set()
    thread.join(LONG_S)
    assert thread.left == 1
    assert thread.close()
