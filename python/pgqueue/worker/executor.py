"""Runs handlers: `def` in threads, `async def` as tasks of an event loop.

They share `concurrency` slots. An attempt occupies its slot until its handler has returned,
even if it was given up long before. The thread or task that ends an attempt goes on with
the next one in the same slot.

An exception that a handler leaves pending for its thread (PyThreadState_SetAsyncExc) may
arrive anywhere. It fails the attempt that the thread is running then, or ends the thread.
Then the worker ends, too: nobody can know what the thread had taken or ended. Other workers
get what it can still release at once, and the rest when its lease expires.
"""

import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from queue import SimpleQueue

from pgqueue.attempt import RELEASED, Attempt, Outcome
from pgqueue.judge import judge
from pgqueue.running import run, run_async
from pgqueue.worker.deadline import cut
from pgqueue.worker.event_loop import EventLoop
from pgqueue.worker.seldom import log, unready
from pgqueue.worker.terms import Terms

ROLLBACK = 0.2  # seconds for a cancelled handler to end its transaction, and its query
RETURNED = "%s has returned: its slot is free"


class Executor:
    """Starts attempts in the order given, and passes each to its finisher when it ends."""

    def __init__(self, terms: Terms) -> None:
        self.concurrency = terms.concurrency
        self.loop = EventLoop()
        self.waiting: deque[Attempt] = deque()
        self.running: set[Attempt] = set()  # these have a slot
        self.given_up: set[Attempt] = set()  # these, too: their handlers run on
        self._error: BaseException | None = None  # what ended a thread
        self._middleware = terms.app.middleware
        self._lock = threading.Lock()  # guards the next three
        self._free = terms.concurrency
        self._threads: list[threading.Thread] = []
        self._idle_threads = 0
        self._for_threads: SimpleQueue[Attempt | None] = SimpleQueue()
        self.began_at = time.monotonic()

    @property
    def unfinished(self) -> int:
        return self.concurrency - self._free + len(self.waiting)

    def submit(self, attempts: Iterable[Attempt]) -> None:
        """Start these as slots become free."""
        if not self.waiting:
            self.began_at = time.monotonic()
        self.waiting.extend(attempts)
        with self._lock:
            self._fill()

    def release_waiting(self) -> None:
        """Leave to other workers what has not started."""
        with contextlib.suppress(IndexError):
            while True:
                attempt = self.waiting.popleft()
                attempt.source.finisher.put(attempt)

    def end(self, attempt: Attempt, outcome: Outcome, runs_on: bool = False) -> bool:
        """End an attempt, and return True unless it has ended before; if its handler `runs_on`, it keeps the slot."""
        if runs_on and attempt.started:
            self.given_up.add(attempt)
        try:
            self.running.remove(attempt)
        except KeyError:
            if attempt in self.given_up:
                self.given_up.discard(attempt)
                log.info(RETURNED, attempt)
            return False
        if attempt.has_timed_out and not runs_on:
            log.info(RETURNED, attempt)
        attempt.outcome = outcome if attempt.started else RELEASED
        attempt.source.finisher.put(attempt)
        return True

    def give_up(self, attempt: Attempt, outcome: Outcome) -> None:
        """End it, and its connection: the report would wait for its locks."""
        if self.end(attempt, outcome, runs_on=True):
            cut(attempt.connection)

    def give_up_all(self, outcome: Outcome) -> None:
        """End what still runs; async handlers may clean up until `close` has to end."""
        if left := list(self.running):
            log.warning("giving up %s unfinished attempts, for lack of time", len(left))
        for attempt in left:
            if not attempt.runs_in:
                self.give_up(attempt, outcome)
            elif self.end(attempt, outcome, runs_on=True):  # and rolls back by itself
                self.loop.get().call_soon_threadsafe(attempt.runs_in.cancel)
        self._wait_for_async(time.monotonic() + ROLLBACK)
        for attempt in self.given_up.intersection(left):
            cut(attempt.connection)

    def take_back(self, attempt: Attempt) -> None:
        """Leave to other workers what has a slot, but has not started."""
        if self.end(attempt, RELEASED):
            with self._lock:
                self._free += 1

    def check(self) -> None:
        """Raise RuntimeError when a thread has ended."""
        if self._error or not all(thread.is_alive() for thread in self._threads):
            raise RuntimeError("a thread of handlers has ended") from self._error

    def cancel(self, attempt: Attempt) -> None:
        """Cancel an async handler, once: a second time would interrupt its clean-up."""
        if attempt.started and attempt.task.is_async:
            self.loop.get().call_soon_threadsafe(self._cancel, attempt)

    def close(self, until: float) -> None:
        """End idle threads and the loop, and wait: Python may crash if they end with it. What runs on is left alone."""
        self._wait_for_async(until)
        runs_on = self.running | self.given_up
        for _ in self._threads:
            self._for_threads.put(None)
        if not any(a.task.is_async for a in runs_on):
            self.loop.close(until)
        for thread in [] if runs_on else self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _wait_for_async(self, until: float) -> None:
        """Wait for async handlers that were given up."""
        given_up = self.given_up
        while time.monotonic() < until and any(a.task.is_async for a in list(given_up)):
            time.sleep(0.01)

    def _fill(self) -> None:
        """Give free slots to what waits; the caller holds the lock."""
        with contextlib.suppress(IndexError):  # another slot was faster
            while self._free:
                attempt = self.waiting.popleft()
                self._free -= 1
                self._place(attempt)

    def _place(self, attempt: Attempt) -> None:
        """Begin it in a slot, or put it off."""
        self.running.add(attempt)
        try:
            if attempt.task.is_async:
                self.loop.get().call_soon_threadsafe(self._start_task, attempt)
                return
            if self._idle_threads:
                self._idle_threads -= 1
            else:
                name = "pgqueue-handler"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)  # only now: `check` wants them alive
            self._for_threads.put(attempt)
        except (RuntimeError, OSError) as error:  # a limit of the system
            self._free += 1
            attempt.started = time.monotonic()
            self.end(attempt, judge(attempt, unready("thread", error)))

    def _next(self, is_async: bool) -> Attempt | None:
        """Take the next attempt into the caller's slot, if it is of the caller's sort."""
        with contextlib.suppress(IndexError):
            attempt = self.waiting.popleft()  # no lock: quick jobs would pay for it
            if attempt.task.is_async is is_async:
                self.running.add(attempt)
                return attempt
            with self._lock:
                self._idle_threads += not is_async
                self._place(attempt)
            return None
        with self._lock:
            self._free += 1
            self._idle_threads += not is_async
            self._fill()  # with what was submitted meanwhile
        return None

    def _begin(self, attempt: Attempt) -> bool:
        now = time.monotonic()
        if now >= attempt.expires or attempt.is_cancelled:
            self.end(attempt, RELEASED)
        if attempt not in self.running:
            return False
        attempt.started = self.began_at = now
        return True

    def _work(self) -> None:
        middleware = self._middleware
        try:
            attempt = self._for_threads.get()
            while attempt is not None:
                if self._begin(attempt):
                    self.end(attempt, run(attempt, middleware))
                attempt = self._next(is_async=False) or self._for_threads.get()
        except BaseException as error:
            self._error = error

    def _start_task(self, attempt: Attempt) -> None:
        loop, running = self.loop.get(), self._attempt(attempt)
        try:
            attempt.runs_in = loop.create_task(running, context=contextvars.Context())
        except Exception as error:  # raised by a task factory that takes no context
            running.close()
            attempt.started = time.monotonic()
            if self.end(attempt, judge(attempt, error)):
                loop.call_soon(self._follow)
            return
        attempt.runs_in.add_done_callback(partial(self._task_ended, attempt))

    async def _attempt(self, attempt: Attempt) -> None:
        if attempt not in self.running:
            return  # it was released while the loop was blocked
        try:
            if self._begin(attempt):
                self.end(attempt, await run_async(attempt, self._middleware))
        finally:
            self.loop.get().call_soon(self._follow)  # an eager task would recurse

    def _task_ended(self, attempt: Attempt, task: object) -> None:
        if self.end(attempt, RELEASED):  # a handler cancelled it before it started
            self._follow()

    def _follow(self) -> None:
        if following := self._next(is_async=True):
            self._start_task(following)

    def _cancel(self, attempt: Attempt) -> None:
        if attempt in self.running and not attempt.stops_since and attempt.runs_in:
            attempt.stops_since = time.monotonic()
            attempt.runs_in.cancel()
