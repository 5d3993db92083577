"""The worker: claims jobs, runs their handlers, and reports how they ended.

    dispatcher   claims jobs for the free slots, and sleeps when none is due
    prefetch     says how many jobs to claim ahead of that
    executor     runs handlers, in threads and on an event loop
    watch        ends handlers that must not go on
    finisher     reports to the server how attempts ended
    heartbeat    extends the leases of all claimed jobs, and reports their progress
    maintenance  declares schedules, and calls maintain() about once a minute

Dispatcher, finisher, heartbeat and maintenance have a thread and a connection of their own. The thread of
`Worker.run` supervises them: when one of them dies, the worker ends.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from pgqueue import database
from pgqueue.attempt import Attempt, Outcome
from pgqueue.terminal import version
from pgqueue.worker.connections import Connections
from pgqueue.worker.deadline import Server
from pgqueue.worker.dispatcher import Dispatcher
from pgqueue.worker.event_loop import TICK
from pgqueue.worker.executor import Executor
from pgqueue.worker.finisher import Finisher
from pgqueue.worker.heartbeat import Heartbeat
from pgqueue.worker.maintenance import Maintenance
from pgqueue.worker.prefetch import Prefetch
from pgqueue.worker.seldom import Outages, log, one_line, unless_from_server
from pgqueue.worker.service import Service
from pgqueue.worker.terms import Terms
from pgqueue.worker.watch import Watch

# Seconds
SHORTEST = 3.0  # that a call may take, however short the lease
REPORTING = 0.8  # for the last reports, after the shutdown timeout
JOINING = 0.1  # for idle threads to end

STOPPED = Outcome("fail", "WorkerStopped: it ran when its worker ended", timedelta())
MAY_BE_DUE = {"retry", "released", "suspended"}


class Worker(Terms):
    """Runs the jobs of some queues with the handlers of an app.

    `queues` maps names to a Share, or to a weight; without it, the worker works on those that
    the handlers of the app name. The other options are those of `python -m pgqueue.worker`, with
    times in seconds. `on_tick` is called some times a second while no part of the worker has
    died or hangs, `on_commit` whenever outcomes have been committed.

    Raises ValueError for no queue, for what must be positive, or only_known without a handler;
    TypeError for a handler whose annotations name what is not there;
    psycopg.ProgrammingError for a dsn that libpq does not understand.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stops = 0
        self._why = ""  # it stops
        self.stop_by = float("inf")  # in monotonic seconds
        # An Event would lock a signal handler out that comes while it is being waited for.
        self._tick: SimpleQueue[None] = SimpleQueue()

        # As the view workers expects.
        session = f"pgqueue {re.sub('[^ -~]', '?', self.id[-55:])}"
        dsn = database.conninfo(self.dsn, name=session)
        server = Server(dsn, self._patience, Outages())
        self.prefetch = Prefetch(self.concurrency, self.batch, self.max_jobs)
        around = self.app.middleware
        connections = Connections(server)
        self.executor = Executor(connections, self.concurrency, self._ended, around)
        self.watch = Watch(self.executor)
        self.heartbeat = Heartbeat(server, self.executor.cancel)
        self.finisher = Finisher(server, self.prefetch, self._committed)
        parts = self.prefetch, self.executor, self.heartbeat, self.finisher
        self.dispatcher = Dispatcher(server, self, *parts)
        maintenance = Maintenance(server, self.app)
        self._services: list[Service] = [self.finisher, self.heartbeat]
        self._services += [maintenance, self.dispatcher]

    def stop(self, why: str = "asked to") -> None:
        """Drain, then end; called again, end now. Signal handlers may call it."""
        self._why = self._why or why
        self._stops += 1
        self.stop_by = time.monotonic() + self.shutdown_timeout * (self._stops == 1)
        self._tick.put(None)

    def run(self) -> None:
        """Work until stopped, until nothing is due (burst), or for max_jobs jobs.

        Waits for the end of an outage. Raises psycopg's errors for what waiting cannot fix,
        such as InvalidSchemaName without pgqueue, or InsufficientPrivilege; RuntimeError
        when handlers that do not end hold all slots, or one of its threads has ended; what a
        hook raises; and KeyboardInterrupt, once what runs has ended.
        """
        lease = f", lease {self.lease:g} s" if self.lease else ""
        terms = f"{self.concurrency} at once{lease}, pgqueue {version()}"
        shares = ", ".join(f"{name}{share}" for name, share in self.shares.items())
        whose = "" if self.queues else " (those of its handlers)"
        log.info("%s works on %s%s, %s", self.id, shares, whose, terms)
        interrupt = None
        log.disabled = False  # as dictConfig does to what there is when an app calls it
        try:
            if self._call(self.app.startup):
                log.disabled = False
                for service in self._services:
                    service.thread.start()
            while not self._is_over():
                try:
                    self._check()
                    with contextlib.suppress(Empty):
                        self._tick.get(timeout=TICK)
                except KeyboardInterrupt as error:  # a second one ends what runs
                    interrupt = error
                    self.stop("told by Ctrl-C")
        finally:
            self._end()
        if interrupt:
            raise interrupt

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

        def has_time() -> bool:
            self.on_tick()
            return time.monotonic() < max(self.stop_by, until)

        return self.executor.loop.call(hooks, has_time)

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
            self._tick.put(None)  # it may have been the last

    # Supervision

    def _check(self) -> None:
        for service in self._services:
            service.check()
        self.watch.check()
        self.finisher.count_quick()
        if self._stops and not self.dispatcher.is_paused:
            left = len(self.heartbeat.held)
            log.info(
                "%s is stopping, %s; unfinished jobs: %s", self.id, self._why, left
            )
            self.dispatcher.is_paused = True
        if self._stops or self.prefetch.is_too_much(len(self.executor.waiting)):
            self.executor.release_waiting()
        if not any(service.is_late() for service in self._services):
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
        self.executor.give_up_all(STOPPED)
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
