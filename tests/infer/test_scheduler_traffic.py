"""The scheduler with random requests."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.collector import Collector
from support.fake_engine import alone

from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.infer.scheduler import QueueFull


class Traffic(RuleBasedStateMachine):
    """Random requests with few different tokens, so that they share prefixes, and random cancels. `alone` is the
    reference."""

    @initialize(
        slots=st.integers(1, 4),
        max_prefill_tokens=st.integers(1, 6),
        max_queue=st.integers(0, 3),
        max_steps=st.integers(1, 5),
        min_copy=st.integers(1, 4),
        ring=st.sampled_from([None, (3, 5), (4, 9)]),
    )
    def start(self, **sizes):
        self.c = Collector(context=24, vocab=7, **sizes)
        self.max_queue = sizes["max_queue"]
        self.waiting: list[int] = []
        self.order: list[int] = []
        self.cancelled: dict[int, int] = {}  # request to its number of tokens

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        sampling=st.builds(
            lambda max_tokens, min_tokens, **others: SamplingParams(
                max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), **others
            ),
            st.integers(0, 8),
            st.integers(0, 3),
            seed=st.integers(0, 6),
            stop_token_ids=st.sampled_from([(), (1,), (0, 3)]),
            prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
        ),
    )
    def submit(self, prompt, sampling):
        request = len(self.c.requests)
        full = len(self.waiting) >= self.max_queue + self.c.engine.slots - len(self.c.engine.in_use)
        try:
            self.c.submit(request, prompt, sampling)
        except QueueFull:
            assert full
        else:
            assert not full
            self.waiting.append(request)
            self.order.append(request)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.c.step()
            self.waiting = [request for request in self.waiting if request not in self.c.admitted]

    @precondition(lambda self: self.c.requests)
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(sorted(self.c.requests)))
        self.c.scheduler.cancel(request)
        if request not in self.finished():
            if request in self.waiting:
                self.waiting.remove(request)
                self.order.remove(request)
            self.cancelled.setdefault(request, self.count(request))

    def count(self, request: int) -> int:
        return len(self.c.got[request].tokens) if request in self.c.got else 0

    def finished(self) -> set[int]:
        return {request for request, got in self.c.got.items() if got.finish_reason}

    @invariant()
    def what_came_is_right(self):
        c = self.c
        for request, got in c.got.items():
            whole = alone(*c.requests[request], vocab=7)
            assert got.tokens == whole.tokens[: len(got.tokens)]
            assert got.prompt == whole.prompt[: len(got.prompt)]
            assert got.finish_reason is None or got == whole
        assert all(self.count(request) == tokens for request, tokens in self.cancelled.items())
        assert c.admitted == self.order[: len(c.admitted)]
        self.stats_are_right()

    def stats_are_right(self):
        c, stats = self.c, self.c.scheduler.stats
        running = set(c.admitted) - self.finished() - set(self.cancelled)
        assert stats[:3] == (len(running), len(self.waiting), c.engine.slots)
        assert stats.running == len(c.engine.in_use)
        assert stats.prompt_tokens == sum(len(c.requests[request][0]) for request in c.admitted)
        assert stats.generated_tokens == sum(len(got.tokens) for got in c.got.values())
        assert stats.cached_tokens == sum(c.engine.known)
        prefills = [stop - start for kind, *_, start, stop in filter(_is_prefill, c.engine.calls)]
        assert stats.prefilled_tokens == sum(prefills)
        assert stats.reused_tokens == sum(call[3] for call in c.engine.calls if call[0] == "insert")
        assert c.scheduler.idle == (not running and not self.waiting)

    def teardown(self):
        if not hasattr(self, "c"):
            return
        for _ in range(1000):
            if self.c.scheduler.idle:
                break
            self.step(1)
        self.what_came_is_right()
        assert self.finished() == set(self.c.requests) - set(self.cancelled)
        assert self.c.admitted == self.order
        assert not self.c.engine.in_use


def _is_prefill(call: tuple) -> bool:
    return call[0] == "prefill"


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=30)
