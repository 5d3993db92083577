"""The event loop of async handlers, in a thread of its own."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from pgqueue.drivers import settled
from pgqueue.worker.seldom import log

# Probes without an answer
BLOCKED = 4  # more than these: a handler blocks the loop
DEAD = 60  # more than these: it will not answer again, unless a handler blocks it


# psycopg needs one that waits for sockets, which the usual one of Windows does not.
new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
if hasattr(asyncio, "ProactorEventLoop"):
    new_loop = asyncio.SelectorEventLoop


class EventLoop:
    """Starts when it is first needed, and survives whatever its tasks raise."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        run, name = self._run, "pgqueue-loop"
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._is_over = False
        self._until = 0.0
        self._unanswered = 0  # probes

    def get(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = new_loop()
            try:
                self._thread.start()
            except RuntimeError:  # there may be a thread for it later
                self._loop.close()
                self._loop = None
                raise
        return self._loop

    @property
    def is_blocked(self) -> bool:
        return self._unanswered > BLOCKED

    @property
    def is_dead(self) -> bool:
        return self._unanswered > DEAD

    def probe(self) -> bool:
        """Ask for an answer, and return whether the loop has just become blocked."""
        if self._loop is None:
            return False
        self._unanswered += 1
        self._loop.call_soon_threadsafe(self._answer)
        return self._unanswered == BLOCKED + 1

    def call(self, functions: Iterable[Callable[[], Any]]) -> Future[None]:
        """Call functions in a thread of their own, and await on the loop what they return."""
        called: Future[None] = Future()

        def call() -> None:
            try:
                for function in functions:
                    if inspect.isawaitable(result := function()):
                        on_loop = settled(result)
                        asyncio.run_coroutine_threadsafe(on_loop, self.get()).result()
                called.set_result(None)
            except BaseException as error:
                called.set_exception(error)

        threading.Thread(target=call, name="pgqueue-hooks", daemon=True).start()
        return called

    def close(self, until: float) -> None:
        """Cancel its tasks, end it, and wait for that until a moment of the monotonic clock."""
        self._until, self._is_over = until, True
        if self._loop:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(max(0.0, until - time.monotonic()))

    def _answer(self) -> None:
        self._unanswered = 0

    def _run(self) -> None:
        loop = self.get()
        asyncio.set_event_loop(loop)
        while not self._is_over:
            self._go_on(loop.run_forever)
        # What hooks and handlers have left running cleans up, as in asyncio.run().
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            seconds = max(0.0, self._until - time.monotonic())
            ended = loop.create_task(asyncio.wait(tasks, timeout=seconds))
            while not ended.done():
                self._go_on(partial(loop.run_until_complete, ended))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    def _go_on(self, run: Callable[[], Any]) -> None:
        """Run the loop until it stops: SystemExit in any task, even one that a handler created, ends it, too."""
        try:
            run()
        except BaseException as error:
            name = type(error).__name__
            log.warning("%s in a task of a handler", name, exc_info=error)


def is_in_this_thread() -> bool:
    """Whether an event loop runs in the calling thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
