"""The server from its arguments to its exit code: implements device_serve.py."""

import asyncio
import dataclasses
import errno
import functools
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import jax
import uvicorn
from starlette.types import ASGIApp

from mesh_transformer import hub, logs, platforms
from mesh_transformer.checkpoint.open import Checkpoint, split_step
from mesh_transformer.config import Config
from mesh_transformer.errors import RunError, UserError, options_to_add, out_of_memory, plural
from mesh_transformer.gguf.parts import stem
from mesh_transformer.logs import log
from mesh_transformer.runtime.serving.accept import SPARE_CONNECTIONS, Server, raise_file_limit
from mesh_transformer.runtime.serving.access import BoundedConnection
from mesh_transformer.runtime.serving.app import make_app
from mesh_transformer.runtime.serving.cors import check_origin
from mesh_transformer.runtime.serving.hosts import EVERY, HostNames, check_host
from mesh_transformer.runtime.serving.keys import ApiKeys
from mesh_transformer.runtime.serving.loop import EngineLoop, WarmEngine
from mesh_transformer.runtime.serving.model import ServedModel
from mesh_transformer.runtime.session import engine as serving_engine
from mesh_transformer.runtime.session.generation_defaults import generation_defaults
from mesh_transformer.runtime.session.tokenizer import open_tokenizer
from mesh_transformer.runtime.session.weights import config_for
from mesh_transformer.stop_signals import TERMINATIONS

# has the arguments of `serving_engine.open_engine`
OpenEngine = Callable[..., WarmEngine]
MAX_SLOTS, MAX_QUEUE = 1024, 100_000
# time for complete responses to reach their clients after the time for draining has passed
_LAST_BYTES_S = 5.0
# time for the engine to finish its current step
_LAST_STEP_S = 5.0
# longer than clients and proxies keep an idle connection, so that they do not use a closed one
_KEEP_ALIVE_S = 75


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The options of device_serve.py.

    Raises:
        UserError: an option is out of its range.
    """

    checkpoint: str | None = None
    base: str | None = None
    adapter: str | None = None
    host: str = "127.0.0.1"
    port: int = 5000
    api_key_file: str | None = None
    allow_origins: Sequence[str] = ()
    allow_hosts: Sequence[str] = ()
    access_log: bool = False
    slots: int = 8
    max_queue: int = 64
    timeout_s: float = 600.0
    drain_s: float = 30.0
    generation_config: str = "auto"

    def __post_init__(self) -> None:
        for name, value, allowed, fits in [
            ("--port", self.port, "0 (any) to 65535", 0 <= self.port <= 65535),
            ("--slots", self.slots, f"1 to {MAX_SLOTS}", 1 <= self.slots <= MAX_SLOTS),
            ("--max-queue", self.max_queue, f"0 to {MAX_QUEUE}", 0 <= self.max_queue <= MAX_QUEUE),
            ("--timeout-seconds", self.timeout_s, "above 0", 0 < self.timeout_s < math.inf),
            ("--drain-seconds", self.drain_s, "0 or more", 0 <= self.drain_s < math.inf),
        ]:
            if not fits:
                raise UserError(f"{name} {value}: must be {allowed}")
        for origin in self.allow_origins:
            check_origin(origin)
        for name in self.allow_hosts:
            check_host(name)

    def names(self, listener: socket.socket, keys: ApiKeys) -> HostNames:
        """The names by which the server may be asked: those that are given, or, without keys, those of this machine."""
        restricted = self.allow_hosts or (not keys.required and is_loopback(listener))
        return HostNames([self.host, *self.allow_hosts] if restricted and EVERY not in self.allow_hosts else None)


def run(
    config_path: str | None,
    overrides: Sequence[str],
    options: ServeOptions,
    open_engine: OpenEngine | None = None,
) -> int:
    """Serve until SIGTERM, SIGHUP or Ctrl-C, then finish the running requests. A second Ctrl-C cancels them.

    The process ignores SIGTERM and SIGHUP after its return. A SIGHUP that is ignored at the start stays so.

    Args:
        open_engine: replaces `serving_engine.open_engine`.

    Returns:
        The exit code: 0 after a signal, 1 if the engine failed.

    Raises:
        UserError: an argument, the config, the tokenizer, the address or the checkpoint cannot be used.
        RunError: the engine failed.
    """
    platforms.require_one_process()
    logs.set_up()
    # asyncio warns about each client that disconnects during a stream, uvicorn about bytes that are not HTTP
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR)
    raise_file_limit()
    config, checkpoint = config_for(config_path, overrides, options.checkpoint, options.base, options.adapter)
    keys = ApiKeys.of_file(options.api_key_file) if options.api_key_file is not None else ApiKeys()
    # another engine needs no checkpoint
    defaults = {} if open_engine else generation_defaults(checkpoint, options.generation_config)
    platforms.open_devices()
    tokenizer = open_tokenizer(config, checkpoint)
    listener = bind(options.host, options.port)
    warn_of_no_keys(listener, options.host, keys)
    opener = functools.partial(open_engine or _open_own_engine, config, checkpoint, slots=options.slots)
    loop = EngineLoop(opener, slots=options.slots, max_queue=options.max_queue)
    name = served_name(config, config_path, checkpoint)
    model = ServedModel(name, config.model.n_vocab, tokenizer, loop, options.timeout_s, defaults)
    names = options.names(listener, keys)
    app = make_app(model, keys, options.allow_origins, names, access_log=options.access_log)
    service = Service(model, app, listener, options.drain_s)
    ended = asyncio.run(_until_signal(service))
    failure = out_of_memory(loop.failure) or loop.failure
    if isinstance(failure, UserError | RunError):
        raise failure
    code = 1 if failure else 0
    if failure:
        log.error("the engine failed", exc_info=failure)
    # a compilation cannot be interrupted, and a normal exit would wait for it or crash
    if not ended:
        sys.stderr.flush()
        os._exit(code)
    return code


class Service:
    """A server on a bound socket. `app` answers for the model."""

    def __init__(self, model: ServedModel, app: ASGIApp, listener: socket.socket, drain_s: float):
        self._model, self._loop, self._listener, self._drain_s = model, model.loop, listener, drain_s
        self._server = http_server(app, model.loop)

    async def run(self, stopping: asyncio.Event, stop_now: asyncio.Event) -> bool:
        """Serve until `stopping` is set or the engine ends, then drain until `stop_now` is set.

        Returns:
            Whether the engine's thread has ended.
        """
        self._loop.start()
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        log.info("listening on %s (it answers after the line `ready`)", url_of(self._listener))
        await _first(serving, stopping.wait(), self._loop.ended.wait())
        deadline = time.monotonic()
        if not self._loop.ended.is_set():
            deadline += self._drain_s
            if self._loop.busy:
                log.info("stopping: running requests have %g seconds to finish", self._drain_s)
            else:
                log.info("stopping")
            await _first(self._loop.drain(self._drain_s), stop_now.wait())
            if left := self._loop.cut_off():
                log.warning("cancelled %s", plural(left, "unfinished sequence"))
        stopped = asyncio.ensure_future(self._loop.stop(_LAST_STEP_S if self._loop.context else 0))
        # uvicorn closes idle connections and waits for the others
        self._server.should_exit = True
        if not stop_now.is_set():
            await _first(serving, asyncio.sleep(deadline - time.monotonic()), stop_now.wait())
        await _first(serving, asyncio.sleep(_LAST_BYTES_S))
        if left := self._server.cut_off():
            log.warning("closed %d connections whose clients had not read their whole responses", left)
        await serving
        self._model.close()
        return await stopped


async def _until_signal(service: Service) -> bool:
    """Serve until a signal to stop."""
    stopping, stop_now = asyncio.Event(), asyncio.Event()
    home = asyncio.get_running_loop()

    def note(number: int) -> None:
        # a second SIGTERM does not count: cluster managers repeat it
        if stopping.is_set() and number == signal.SIGINT:
            stop_now.set()
        stopping.set()

    for number in (*TERMINATIONS, signal.SIGINT):
        home.add_signal_handler(number, note, number)
    try:
        return await service.run(stopping, stop_now)
    finally:
        # a late signal must not change the exit code
        for number in TERMINATIONS:
            home.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def http_server(app: ASGIApp, loop: EngineLoop) -> Server:
    """The HTTP server of an application that answers for this engine."""
    config = uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    return Server(config, loop.slots + loop.max_queue + SPARE_CONNECTIONS)


async def _first(*awaitables: Awaitable[object]) -> None:
    """Wait until one of the awaitables is done. Cancel the others, except those that were tasks before."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, awaitable in zip(tasks, awaitables, strict=True):
        if task is not awaitable:
            task.cancel()


def url_of(listener: socket.socket) -> str:
    """The URL of a server on a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 chooses a free port.

    Raises:
        UserError: the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    # a host name that DNS cannot contain raises UnicodeError
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        advice = "choose another with --host and --port"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            advice = f"choose another --port; {options_to_add('--port', '0')} takes any free one"
        raise UserError(f"cannot listen on {host} port {port} ({reason}): {advice}") from error


def served_name(config: Config, config_path: str | None, checkpoint: Checkpoint) -> str:
    """The name of a model: its config's, else the file's of the config or the checkpoint's."""
    if config.logging.name:
        return config.logging.name
    if config_path:
        return Path(config_path).stem
    if hub.is_name(checkpoint.path) and hub.gguf_file(checkpoint.path) is None:
        return hub.parse(checkpoint.path).name
    return stem(split_step(checkpoint.path)[0])


def warn_of_no_keys(listener: socket.socket, host: str, keys: ApiKeys) -> None:
    """Warn of a server that other machines can reach and that asks for no key."""
    if not keys.required and not is_loopback(listener):
        warning = "other machines can reach %s, and there is no --api-key-file: anyone can use this server"
        log.warning(warning, host)


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach a socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _open_own_engine(config: Config, checkpoint: Checkpoint, *, slots: int) -> WarmEngine:
    platforms.CompileCache()
    # the hosts of a TPU slice join by themselves
    if jax.process_count() > 1:
        raise UserError(
            f"the devices belong to {jax.process_count()} processes, but a server needs one: use a slice with one host"
        )
    return serving_engine.open_engine(config, checkpoint, slots=slots)
