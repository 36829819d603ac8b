"""A scheduler on the fake engine that collects the outputs of each request."""

from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.infer.scheduler import Scheduler
from support.fake_engine import Completion, FakeEngine, alone


class Collector:
    """Runs a scheduler and collects its outputs by request. By the scheduler's clock, a token takes `token_s`."""

    def __init__(
        self, *, max_queue: int = 100, max_steps: int = 8, min_copy: int = 8, token_s: float = 0.001, **engine
    ):
        self.engine = FakeEngine(**engine)
        self.scheduler = Scheduler(
            self.engine, max_queue=max_queue, max_steps=max_steps, min_copy=min_copy,
            clock=lambda: token_s * self.engine.computed_steps,
        )  # fmt: skip
        self.requests: dict[int, tuple[list[int], SamplingParams]] = {}
        self.got: dict[int, Completion] = {}
        self.admitted: list[int] = []

    def submit(self, request: int, prompt: list[int], sampling: SamplingParams, **how: bool) -> None:
        self.scheduler.submit(request, prompt, sampling, lambda: self.admitted.append(request), **how)
        self.requests[request] = (prompt, sampling)

    def step(self) -> list[int]:
        """Run one step. Returns the requests with outputs."""
        outputs = self.scheduler.step()
        assert len({output.request for output in outputs}) == len(outputs)
        for output in outputs:
            got = self.got.setdefault(output.request, Completion([], [], None))
            assert got.finish_reason is None, "an output after the last"
            assert output.tokens or output.prompt or output.finish_reason
            got.tokens.extend(output.tokens)
            got.prompt.extend(output.prompt)
            got.finish_reason = output.finish_reason
        return [output.request for output in outputs]

    def run(self, *requests: tuple[list[int], SamplingParams]) -> None:
        """Submit requests with the next free IDs, run steps until idle, and check all completions."""
        for prompt, sampling in requests:
            self.submit(len(self.requests), prompt, sampling)
        while not self.scheduler.idle:
            self.step()
        for request, sampling in self.requests.items():
            assert self.got[request] == alone(*sampling)
        assert not self.engine.in_use

    def calls(self, *kinds: str) -> list[tuple]:
        """The engine's calls with these names since the last call of this method."""
        calls, self.engine.calls = self.engine.calls, []
        return [call for call in calls if call[0] in kinds]
