"""An asyncio loop in a thread of its own, for callers with or without a loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from mesh_transformer.errors import UserError

T = TypeVar("T")
CLOSED = "the model is closed: load it again"


class BackgroundLoop:
    """Runs coroutines in a thread, for other threads that wait for their results."""

    def __init__(self, name: str):
        self._loop, self._process = asyncio.new_event_loop(), os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. An exception in this thread meanwhile, such as of Ctrl-C, cancels it.

        Raises:
            UserError: the thread has ended, or this process is a fork of the one that has it.
        """
        if os.getpid() != self._process:
            work.close()
            raise UserError("the model was loaded before this process was forked: load the model in this process")
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise UserError(CLOSED) from error
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise UserError(CLOSED) from error
        except BaseException:
            future.cancel()
            raise

    def post(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine for which nobody waits."""
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(work, self._loop)
        else:
            work.close()

    def close(self) -> None:
        """End the thread. Coroutines that have not ended are cancelled."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
