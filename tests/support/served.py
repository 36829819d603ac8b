"""A server on a loopback port, in a thread, with a fake engine."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from mesh_transformer.data.tokens.tokenizer import ByteTokenizer, Tokenizer
from mesh_transformer.infer.program_table import ProgramCounts
from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.runtime.serving.app import make_app
from mesh_transformer.runtime.serving.keys import ApiKeys
from mesh_transformer.runtime.serving.loop import EngineLoop
from mesh_transformer.runtime.serving.model import ServedModel
from mesh_transformer.runtime.serving.protocol import ErrorResponse
from mesh_transformer.runtime.serving.start import ServeOptions, Service, bind
from support import loopback
from support.fake_engine import Completion, FakeEngine, alone
from support.waiting import LONG_S, until

NAME, VOCAB, CONTEXT = "tiny", 257, 64
KEY = "secret-key-1"
# tokens of a chunk whose program is never missing
SHORT = 4


class ServedEngine(FakeEngine):
    """A fake engine whose warm-up and steps a test can hold, and that a test can break."""

    def __init__(self, **options: Any):
        super().__init__(**{"vocab": VOCAB, "context": CONTEXT, **options})
        self.may_warm_up = threading.Event()
        self.may_warm_up.set()
        self.may_generate = threading.Event()
        self.may_generate.set()
        self.broken = False
        # the program of longer chunks is missing until it is set
        self.compiled = threading.Event()
        self.compiled.set()

    def go_on(self) -> None:
        """End the delay of the steps, and let them go on."""
        self.delay = 0.0
        self.may_generate.set()

    def warm_up(self) -> None:
        self.may_warm_up.wait()

    def compile_rest(self, on_compiled: Callable[[], None]) -> None:
        self.on_compiled = on_compiled

    def ready(self, start: int, stop: int, scored: bool) -> bool:
        return stop - start <= SHORT or self.compiled.is_set()

    @property
    def program_counts(self) -> ProgramCounts:
        return ProgramCounts(3, 18)

    def close(self) -> bool:
        return True

    def generate(self, steps: int) -> Any:
        self.may_generate.wait()
        if self.broken:
            raise RuntimeError("a device was lost")
        return super().generate(steps)


class Served:
    """A running server and a client for it."""

    def __init__(self, engine: ServedEngine, service: Service, model: ServedModel, url: str):
        self.engine, self.model, self.loop, self.url = engine, model, model.loop, url
        self.client = loopback.Client(base_url=url)
        self._service = service
        self._home = asyncio.new_event_loop()
        self._signals: list[asyncio.Event] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The response to a completion request, which must succeed."""
        response = self.post({"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str) -> float:
        """The value of a metric, by its name without the common prefix."""
        lines = self.client.get("/metrics").text.splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith(f"mesh_transformer_{name} ")]
        return float(value)

    @property
    def open_connections(self) -> int:
        return len(self.connections)

    @property
    def connections(self) -> set[Any]:
        """The protocols of the open connections."""
        return self._service._server.server_state.connections

    def allow_connections(self, most: int) -> None:
        """Set the largest number of open connections."""
        self._service._server._most = most

    def terminate(self) -> None:
        """Stop the server as SIGTERM does."""
        self._home.call_soon_threadsafe(self._signals[0].set)

    def _run(self) -> None:
        async def main() -> None:
            self._signals = [asyncio.Event(), asyncio.Event()]
            await self._service.run(*self._signals)

        self._home.run_until_complete(main())
        self._home.close()


@contextmanager
def serve(
    *,
    host: str = "127.0.0.1",
    tokenizer: Tokenizer | None = None,
    max_queue: int = 16,
    keys: Sequence[str] = (),
    allow_origins: Sequence[str] = (),
    allow_hosts: Sequence[str] = (),
    access_log: bool = False,
    timeout_s: float = LONG_S,
    drain_s: float = LONG_S,
    held: bool = False,
    send_buffer: int | None = None,
    defaults: Mapping[str, Any] = {},
    **engine_options: Any,
) -> Iterator[Served]:
    """A server that is warmed up. It is stopped at the end of the `with` block.

    Args:
        held: the warm-up continues until the test sets the engine's `may_warm_up`.
        defaults: sampling options that requests need not name.
        send_buffer: size of the socket's send buffer in bytes. None: several megabytes.
    """
    engine = ServedEngine(**engine_options)
    if held:
        engine.may_warm_up.clear()
    loop = EngineLoop(lambda: engine, slots=engine.slots, max_queue=max_queue)
    model = ServedModel(NAME, engine.vocab, tokenizer or ByteTokenizer(), loop, timeout_s, defaults)
    listener = bind(host, 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    options = ServeOptions(host=host, allow_hosts=allow_hosts)
    api_keys = ApiKeys([key.encode() for key in keys])
    app = make_app(model, api_keys, allow_origins, options.names(listener, api_keys), access_log=access_log)
    service = Service(model, app, listener, drain_s)
    served = Served(engine, service, model, url)
    try:
        if not held:
            until(lambda: loop.state == "ok")
        yield served
    finally:
        engine.may_warm_up.set()
        engine.may_generate.set()
        served.client.close()
        if served.thread.is_alive():
            served.terminate()
        served.thread.join(LONG_S)
        assert not served.thread.is_alive()


def expected(prompt: Sequence[int], **params: Any) -> Completion:
    """The expected completion of a prompt, computed without server, scheduler and cache."""
    fields = {"max_tokens": 16, "stop_token_ids": (256,), **params}
    return alone(list(prompt), SamplingParams(**fields), VOCAB)


def text_of(completion: Completion) -> str:
    return ByteTokenizer().decode(token.id for token in completion.tokens)


def refusal(response, status: int) -> dict:
    """The error in a response, which must have this status and OpenAI's form."""
    assert response.status_code == status, response.text
    ErrorResponse.model_validate(response.json(), strict=True)
    return response.json()["error"]
