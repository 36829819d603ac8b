"""A server of a loaded model, in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import TracebackType
from typing import Self

from mesh_transformer.errors import RunError, out_of_memory
from mesh_transformer.logs import log
from mesh_transformer.runtime.api.background import BackgroundLoop
from mesh_transformer.runtime.serving.app import make_app
from mesh_transformer.runtime.serving.keys import ApiKeys
from mesh_transformer.runtime.serving.model import ServedModel
from mesh_transformer.runtime.serving.start import ServeOptions, bind, http_server, url_of, warn_of_no_keys

# time for running requests to finish at the end
_DRAIN_S = 30.0


class Server:
    """Serves until `stop`, or the end of `with`. The model answers other calls meanwhile, and stays loaded after it.

    Args:
        background: the loop of the model's engine.

    Raises:
        UserError: the address cannot be used.
    """

    def __init__(self, model: ServedModel, options: ServeOptions, background: BackgroundLoop):
        keys = ApiKeys()
        listener = bind(options.host, options.port)
        warn_of_no_keys(listener, options.host, keys)
        self.url = url_of(listener)
        """Such as http://127.0.0.1:5000."""
        self._background = background
        self._stopped, self._ended = False, threading.Event()
        app = make_app(model, keys, options.allow_origins, options.names(listener, keys))
        self._loop = model.loop
        self._http = http_server(app, model.loop)
        try:
            background.run(self._start(model, listener))
        except BaseException:
            listener.close()
            raise
        log.info("listening on %s", self.url)

    def stop(self) -> None:
        """Accept no more requests, and wait for the running ones, at most 30 s."""
        if not self._stopped:
            self._background.run(self._stop())
            self._stopped = True
            self._ended.set()

    def wait(self) -> None:
        """Wait until another thread stops the server, or the model fails. Ctrl-C ends the wait, as an exception.

        Raises:
            RunError: the model has failed.
        """
        self._ended.wait()
        if (failure := self._loop.failure) is not None:
            raise out_of_memory(failure) or RunError(f"the model failed: {failure}") from failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    async def _start(self, model: ServedModel, listener: socket.socket) -> None:
        await model.loop.warm_up()
        self._serving = asyncio.ensure_future(self._http.serve(sockets=[listener]))
        self._watching = asyncio.ensure_future(self._watch())
        while not self._http.started and not self._serving.done():
            await asyncio.sleep(0.01)

    async def _watch(self) -> None:
        ended = asyncio.ensure_future(self._loop.ended.wait())
        await asyncio.wait([self._serving, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        self._ended.set()

    async def _stop(self) -> None:
        self._http.should_exit = True
        await asyncio.wait([self._serving], timeout=_DRAIN_S)
        self._http.cut_off()
        await self._serving
