"""The event loop of async handlers, in a thread of its own."""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from typing import Any

log = logging.getLogger("pgqueue")

BLOCKED = 4  # looks without a turn of the loop, after which it counts as blocked
DEAD = 60  # after which it is not expected to go on, unless a handler blocks it


class EventLoop:
    """Starts when first needed, and outlives whatever its tasks raise."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(
            target=self._run, name="pgqueue-loop", daemon=True
        )
        self._is_over = False
        self._unanswered = 0  # looks since it had a turn

    def get(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread.start()
        return self._loop

    @property
    def is_blocked(self) -> bool:
        return self._unanswered > BLOCKED

    @property
    def is_dead(self) -> bool:
        return self._unanswered > DEAD

    def look(self) -> bool:
        """Ask it for a turn; whether it is found blocked just now."""
        if self._loop is None:
            return False
        self._unanswered += 1
        self._loop.call_soon_threadsafe(self._answer)
        return self._unanswered == BLOCKED + 1

    def call(self, functions: Iterable[Callable[[], Any]]) -> Future[None]:
        """Call functions in a thread of their own, and on the loop what is to be awaited."""
        called: Future[None] = Future()

        def call() -> None:
            try:
                for function in functions:
                    if inspect.isawaitable(result := function()):
                        on_loop = _wait_for(result)
                        asyncio.run_coroutine_threadsafe(on_loop, self.get()).result()
                called.set_result(None)
            except BaseException as error:
                called.set_exception(error)

        threading.Thread(target=call, name="pgqueue-hooks", daemon=True).start()
        return called

    def close(self, until: float) -> None:
        """End it, and wait for that until a moment of the monotonic clock."""
        self._is_over = True
        if self._loop:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(max(0.0, until - time.monotonic()))

    def _answer(self) -> None:
        self._unanswered = 0

    def _run(self) -> None:
        loop = self.get()
        asyncio.set_event_loop(loop)
        while not self._is_over:
            # SystemExit of any task, also of one that a handler made, ends run_forever.
            try:
                loop.run_forever()
            except BaseException as error:
                log.warning("%s in a task of a handler", type(error).__name__)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _wait_for(result: Awaitable[Any]) -> None:
    await result
