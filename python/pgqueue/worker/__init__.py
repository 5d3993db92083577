"""The worker: claims jobs, runs their handlers, and reports how they ended.

    dispatcher   claims jobs for the free slots, and sleeps when none is due
    executor     runs handlers, in threads and on an event loop
    finisher     reports to the server how attempts ended
    heartbeat    extends the leases of all claimed jobs, and reports their progress
    maintenance  declares schedules, and calls maintain() about once a minute

All but the executor have a thread and a connection of their own. The thread of
`Worker.run` supervises them: when one of them dies, the worker ends.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any

from pgqueue import database
from pgqueue.app import App
from pgqueue.attempt import NO_TASK, Attempt, Outcome
from pgqueue.terminal import version
from pgqueue.worker.deadline import Deadline
from pgqueue.worker.dispatcher import Dispatcher, Share
from pgqueue.worker.event_loop import TICK
from pgqueue.worker.executor import Executor
from pgqueue.worker.finisher import Finisher
from pgqueue.worker.heartbeat import Heartbeat
from pgqueue.worker.maintenance import Maintenance
from pgqueue.worker.prefetch import Prefetch
from pgqueue.worker.seldom import Outages, Seldom, one_line, unless_from_server
from pgqueue.worker.service import Service

__all__ = ["Share", "Worker"]

log = logging.getLogger("pgqueue")

# Seconds
SHORTEST = 3.0  # that a call may take, however short the lease
REPORTING = 0.8  # for the last reports, after the shutdown timeout
JOINING = 0.1  # for idle threads to end

STOPPED = Outcome("fail", "WorkerStopped: it ran when its worker ended", timedelta())
MAY_BE_DUE = {"retry", "released"}
UNKNOWN_KIND = Outcome("release", delay=timedelta(minutes=1))


@dataclass(eq=False, repr=False)
class Worker:
    """Runs the jobs of some queues with the handlers of an app.

    `queues` maps names to a Share, or to a weight. The other options are those of
    `python -m pgqueue.worker`, with times in seconds. `on_tick` is called some times a
    second while no part of the worker has died or hangs, `on_commit` whenever outcomes have been
    committed.

    Raises ValueError for no queue, a concurrency below 1, or only_known without a handler;
    psycopg.ProgrammingError for a dsn that libpq does not understand.
    """

    app: App
    queues: Mapping[str, Share | int]
    _: KW_ONLY
    dsn: str | None = None
    name: str | None = None
    concurrency: int = 10
    batch: int = 5000
    lease: float | None = None
    timeout: float | None = None
    poll_interval: float = 5.0
    call_timeout: float | None = None
    shutdown_timeout: float = 30.0
    listen: bool = True
    burst: bool = False
    only_known: bool = False
    max_jobs: int | None = None
    on_tick: Callable[[], None] = lambda: None
    on_commit: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if not self.queues or self.concurrency < 1:
            raise ValueError("a worker needs a queue and a concurrency of 1 at least")
        if self.only_known and not self.app.tasks:
            raise ValueError("only_known, but the app has no handler")
        name = (self.name or socket.gethostname()).encode(errors="replace")[:150]
        name_and_pid = f"{name.decode(errors='ignore')}:{os.getpid()}"
        self.id = f"{name_and_pid}:{secrets.token_hex(4)}"
        self.listen = self.listen and not self.burst
        self._stops = 0
        self._why = ""  # it stops
        self.stop_by = float("inf")  # in monotonic seconds
        self._tick = threading.Event()
        self._seldom = Seldom()

        # As the view workers expects.
        session = f"pgqueue {re.sub('[^ -~]', '?', self.id[-55:])}"
        dsn, outages = database.named(database.conninfo(self.dsn), session), Outages()
        beat, call, long = (Deadline(dsn, self._patience, n) for n in (1 / 3, 1, 10))
        self.prefetch = Prefetch(self.concurrency, self.batch, self.max_jobs)
        self.executor = Executor(
            dsn, self.concurrency, self._ended, self.app.middleware, self._patience
        )
        self.heartbeat = Heartbeat(beat, outages, self.executor.cancel)
        self.dispatcher = Dispatcher(call, outages, self)
        self.finisher = Finisher(call, outages, self.prefetch, self._committed)
        self._services: list[Service] = [self.finisher, self.heartbeat]
        maintenance = Maintenance(long, outages, self.app)
        self._services += [maintenance, self.dispatcher]

    def stop(self, why: str = "asked to") -> None:
        """Drain, then end; called again, end now. Signal handlers may call it."""
        self._why = self._why or why
        self._stops += 1
        self.stop_by = time.monotonic() + self.shutdown_timeout * (self._stops == 1)
        self._tick.set()

    def run(self) -> None:
        """Work until stopped, until nothing is due (burst), or for max_jobs jobs.

        Waits for the end of an outage. Raises psycopg's errors for what waiting cannot fix,
        such as InvalidSchemaName without pgqueue, or InsufficientPrivilege; RuntimeError
        when handlers that do not end occupy all slots, or one of its threads has ended; and
        what a hook raises.
        """
        lease = f", lease {self.lease:g} s" if self.lease else ""
        terms = f"{self.concurrency} at once{lease}, pgqueue {version()}"
        log.info("%s works on %s, %s", self.id, self.dispatcher.shares(), terms)
        log.disabled = False  # as dictConfig does to what there is when an app calls it
        try:
            if self._call(self.app.startup):
                log.disabled = False
                for service in self._services:
                    service.thread.start()
            while not self._is_over():
                self._check()
                self._tick.wait(TICK)
                self._tick.clear()
        finally:
            self._end()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Worker"]:
        """Run in a thread beside an event loop, as in FastAPI's lifespan; then stop.

        Leaving the context raises what `run` raised.
        """
        pool = ThreadPoolExecutor(1, "pgqueue-worker")
        running = asyncio.get_running_loop().run_in_executor(pool, self._run_and_log)
        pool.shutdown(wait=False)
        try:
            yield self
        finally:
            self.stop()
            await running

    def _run_and_log(self) -> None:
        try:
            self.run()
        except BaseException as error:
            trace = unless_from_server(error)  # `running` raises it late
            log.error("%s has failed: %s", self.id, one_line(error), exc_info=trace)
            raise

    def _call(self, hooks: list[Callable[[], Any]], until: float = 0.0) -> bool:
        """Call hooks, and return whether they ended before the shutdown timeout did."""
        return self.executor.loop.call(
            hooks, lambda: time.monotonic() < max(self.stop_by, until)
        )

    # For the dispatcher

    def kinds(self) -> list[str] | None:
        """Return the kinds to claim; None is all."""
        if self.executor.loop.is_blocked:
            return [kind for kind, task in self.app.tasks.items() if not task.is_async]
        return list(self.app.tasks) if self.only_known else None

    def want(self) -> int:
        """Return how many jobs to claim: 0 while the finisher has fallen behind."""
        if len(self.heartbeat.held) > 2 * (self.batch + self.concurrency):
            return 0
        return self.prefetch.want(self.executor.unfinished)

    def begin(self, attempts: list[Attempt], since: float) -> None:
        """Run what was claimed at a moment of the monotonic clock."""
        self.heartbeat.hold(attempts, since)
        self.prefetch.claimed(len(attempts))
        free = self.concurrency - self.executor.unfinished
        last = [a for a in attempts if a.number >= a.max_attempts]
        if last:
            self.prefetch.saw_last_attempts()
            attempts = last + [a for a in attempts if a.number < a.max_attempts]
        not_ahead = set(last[max(0, free) :])
        for attempt in attempts:
            # Claimed meanwhile, or never to wait here: leave it to other workers.
            if self.dispatcher.is_paused or attempt in not_ahead:
                self._give_back(attempt)
            elif task := self.app.tasks.get(attempt.kind):
                attempt.task = task
                attempt.timeout = task.policy.timeout or self.timeout
            else:
                self._put_off(attempt)
        self.executor.submit(a for a in attempts if a.task is not NO_TASK)

    def _give_back(self, attempt: Attempt) -> None:
        self.prefetch.claimed(-1)
        self.finisher.put(attempt)

    def _put_off(self, attempt: Attempt) -> None:
        """Leave a job of an unknown kind to other workers, but not at once."""
        attempt.outcome = UNKNOWN_KIND
        self.finisher.put(attempt)
        level, extra = self._seldom.level(attempt.kind), attempt.fields
        log.log(level, "no handler for the kind of %s: put off", attempt, extra=extra)

    # What the executor and the finisher call

    def _ended(self, attempt: Attempt) -> None:
        self.finisher.put(attempt)
        self.dispatcher.slot_freed()

    def _committed(self, attempts: list[Attempt], statuses: set[str]) -> None:
        self.on_commit()
        if self.burst:
            self.dispatcher.look_again()  # for what their handlers have enqueued
        self.heartbeat.held.difference_update(attempts)
        if self.dispatcher.has_limits or not MAY_BE_DUE.isdisjoint(statuses):
            self.dispatcher.look_again()
        self.dispatcher.slot_freed()
        if not self.heartbeat.held and self._stops:
            self._tick.set()  # it may have been the last

    # Supervision

    def _check(self) -> None:
        for service in self._services:
            service.check()
        answers = [service.deadline.check() for service in self._services]
        self.executor.check()
        self.finisher.count_quick()
        if self._stops and not self.dispatcher.is_paused:
            left = len(self.heartbeat.held)
            log.info(
                "%s is stopping, %s; unfinished jobs: %s", self.id, self._why, left
            )
            self.dispatcher.is_paused = True
        if self._stops or self.prefetch.is_too_much(len(self.executor.waiting)):
            self.executor.release_waiting()
        if all(answers):
            self.on_tick()

    def _patience(self) -> float:
        """Return for how long a call to the server is of use."""
        return self.call_timeout or max(self.heartbeat.lease, SHORTEST)

    def _is_over(self) -> bool:
        """Whether nothing is left to do, or no time to do it."""
        if time.monotonic() >= self.stop_by:
            return True
        if self.heartbeat.held:
            return False
        is_done = self.prefetch.left == 0 or (self.burst and self.dispatcher.is_drained)
        return bool(self._stops) or is_done

    def _end(self) -> None:
        until = time.monotonic() + REPORTING
        self.dispatcher.is_paused = True
        self.dispatcher.close()
        self.dispatcher.join(until - REPORTING / 2)  # what it claims now is released
        if left := list(self.executor.running):
            log.warning("giving up %s unfinished attempts, for lack of time", len(left))
        for attempt in left:
            self.executor.end(attempt, STOPPED, runs_on=True)
        self.executor.release_waiting()
        for service in self._services:
            service.close()
        for service in self._services:
            service.join(until)
        try:
            if self.dispatcher.thread.ident:  # it was started
                self._call(self.app.shutdown, until)
        finally:
            self.executor.close(max(until, time.monotonic() + JOINING))
        self.finisher.count_quick(is_last=True)
        counts = [f"{n} {status}" for status, n in self.finisher.statuses.items()]
        log.info("%s ends: %s", self.id, ", ".join(counts) or "no jobs")
