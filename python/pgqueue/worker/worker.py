"""The worker: claims jobs, runs their handlers, and reports how they ended.

    sources      has the parts that there are for each database: dispatcher, finisher, heartbeat, maintenance
    dispatcher   claims jobs for the free slots, and sleeps when none is due
    turns        says how many to claim, also between several databases
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
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from pgqueue import database
from pgqueue.attempt import Attempt, Outcome
from pgqueue.terminal import version
from pgqueue.worker import watch
from pgqueue.worker.deadline import notices_silence
from pgqueue.worker.executor import Executor
from pgqueue.worker.seldom import failed, log
from pgqueue.worker.sources import Sources
from pgqueue.worker.terms import Terms
from pgqueue.worker.turns import Turns

# Seconds
REPORTING = 0.8  # for the last reports, after the shutdown timeout
JOINING = 0.1  # for idle threads to end
TICK = 0.25  # between two checks

STOPPED = Outcome("fail", "WorkerStopped: it ran when its worker ended", timedelta())
MAY_BE_DUE = {"retry", "released", "suspended"}


class Worker(Terms):
    """Runs the jobs of some queues with the handlers of an app.

    `queues` maps names to a Share, or to a weight; without it, the worker works on those that
    the handlers of the app name. The other options are those of `python -m pgqueue.worker`, with
    times in seconds. With several in `dsn`, the databases share its slots. `on_tick` is called
    several times a second as long as no part of the worker has died or hangs, `on_commit` whenever
    outcomes have been committed, `on_lease` before jobs begin whose leases are longer than any yet.

    Raises ValueError for no queue, for a value that must be positive or whole, and for only_known
    without a handler; TypeError for queues that are not a mapping, and for a handler whose
    annotations name what is not there; psycopg.ProgrammingError for a dsn that libpq does not
    understand.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_used = False
        self._process = os.getpid()
        self._stops = 0
        self._why = ""  # it stops
        self._failure: BaseException | None = None  # what ends it, if not told to
        self.stop_by = float("inf")  # in monotonic seconds
        # An Event would block a signal handler that comes while it is being waited for.
        self._tick: SimpleQueue[None] = SimpleQueue()

        # As the view workers expects.
        session = f"pgqueue {re.sub('[^ -~]', '?', self.id[-55:])}"
        dsns = database.conninfos(self.dsn, name=session)
        self.executor = Executor(self)
        self.turns = Turns(self, self.executor)
        self.sources = Sources(dsns, self.turns, self._committed)

    def stop(self, why: str = "asked to") -> None:
        """Drain, then end; called again, end now. Signal handlers may call it."""
        self._why = self._why or why
        self._stops += 1
        patience = self.shutdown_timeout if self._stops == 1 else 0.0
        self.stop_by = time.monotonic() + patience
        self._tick.put(None)

    def run(self) -> None:
        """Work until stopped, until nothing is due (burst), or for max_jobs jobs.

        Waits for the end of an outage. Raises psycopg's errors for what waiting cannot fix,
        such as InvalidSchemaName without pgqueue, or InsufficientPrivilege; RuntimeError
        when handlers that do not end hold all slots, or one of its threads has ended; what a
        hook raises; KeyboardInterrupt, once what runs has ended; and RuntimeError for a
        second call: its threads end with the first, and in a process forked since it was made.
        """
        if self._is_used or self._process != os.getpid():
            fork = "in the process that made it, not in a fork"
            how = "once: make another" if self._is_used else fork
            refusal = RuntimeError(f"a worker runs {how}")
            failed(self.id, refusal)  # `running` raises it late
            raise refusal
        self._is_used = True
        log.disabled = False  # an app's dictConfig disables loggers that exist
        lease = f", lease {self.lease:g} s" if self.lease else ""
        where = f" in {n} databases" if (n := len(self.sources)) > 1 else ""
        terms = f"{self.concurrency} at once{lease}{where}, pgqueue {version()}"
        shares = ", ".join(f"{name}{share}" for name, share in self.shares.items())
        whose = "" if self.queues else " (those of its handlers)"
        log.info("%s works on %s%s, %s", self.id, shares, whose, terms)
        if not notices_silence():
            log.warning(
                "a connection that hangs goes unnoticed: update psycopg to 3.2.11"
            )
        interrupt = None
        try:
            if self._call(self.app.startup):
                log.disabled = False
                for service in self.sources.services:
                    service.thread.start()
            while not self._is_over():
                try:
                    self._check()
                    with contextlib.suppress(Empty):
                        self._tick.get(timeout=TICK)
                except KeyboardInterrupt as error:  # a second one ends what runs
                    interrupt = error
                    self.stop("told by Ctrl-C")
            if self.burst and not interrupt and (errors := self.sources.refusals()):
                raise errors[0]
        except (Exception, SystemExit) as error:  # before hooks that may take long
            self._fails(error)
        finally:
            self._end()
        for why in self._failure, interrupt:
            if why is not None:
                raise why

    def _fails(self, error: BaseException) -> None:
        self._failure = error
        failed(self.id, error)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Worker"]:
        """Run in a thread beside an event loop, as in FastAPI's lifespan; then stop.

        Leaving the context raises what `run` raised.
        """
        pool = ThreadPoolExecutor(1, "pgqueue-worker")
        running = asyncio.get_running_loop().run_in_executor(pool, self.run)
        pool.shutdown(wait=False)
        try:
            yield self
        finally:
            self.stop()
            await running

    def _call(self, hooks: list[Callable[[], Any]], until: float = 0.0) -> bool:
        """Call hooks, and return whether they ended before the shutdown timeout did."""
        if not hooks:
            return True
        called = self.executor.loop.call(hooks)
        while not wait([called], TICK).done:
            if not self._failure:
                self.on_tick()
            if time.monotonic() >= max(self.stop_by, until):
                log.warning("a hook does not end: given up")
                return False
        called.result()
        return True

    def _committed(self, attempts: list[Attempt], statuses: set[str]) -> None:
        """Go on from what a finisher has reported; it calls this in its thread."""
        self.on_commit()
        turns = self.turns
        if self.burst:
            turns.look_again()  # for what their handlers have enqueued
        attempts[0].source.heartbeat.held.difference_update(attempts)
        if turns.has_limits or not MAY_BE_DUE.isdisjoint(statuses):
            turns.look_again()
        turns.slot_freed()
        if self._stops and not self.sources.held:
            self._tick.put(None)  # it may have been the last

    # Supervision

    def _check(self) -> None:
        sources = self.sources
        for service in sources.services:
            service.check()
        watch.check(self.executor)
        sources.tidy()
        refusals = sources.refusals()
        if len(refusals) == len(sources) and not self.burst:
            raise refusals[0]
        if self._stops and not self.turns.is_paused:
            self.turns.is_paused = True
            said = self.id, self._why, sources.held
            log.info("%s is stopping, %s; unfinished jobs: %s", *said)
        if self._stops or self.turns.is_too_much():
            self.executor.release_waiting()
        if not any(service.is_late() for service in sources.services):
            self.on_tick()

    def _is_over(self) -> bool:
        """Whether nothing is left to do, or no time to do it."""
        if time.monotonic() >= self.stop_by:
            return True
        if self.sources.held:
            return False
        is_done = self.turns.left == 0 or (self.burst and self.sources.is_drained)
        return bool(self._stops) or is_done

    def _end(self) -> None:
        until = time.monotonic() + REPORTING
        self.stop_by = min(self.stop_by, time.monotonic() + self.shutdown_timeout)
        services = self.sources.services
        self.turns.is_paused = True  # what is claimed now is released
        for dispatcher in self.sources.dispatchers:
            dispatcher.close()
        for dispatcher in self.sources.dispatchers:
            dispatcher.join(until - REPORTING / 2)
        self.executor.give_up_all(STOPPED)
        self.executor.release_waiting()
        for service in services:
            service.close()
        for service in services:
            service.join(until)
        try:
            if services[0].thread.ident:  # it was started
                self._call(self.app.shutdown, until)
        except (Exception, SystemExit) as error:
            self._fails(error)
        finally:
            self.executor.close(max(until, time.monotonic() + JOINING))
        self.sources.tidy(is_last=True)
        counts = [f"{n} {status}" for status, n in self.sources.statuses.items()]
        log.info("%s ends: %s", self.id, ", ".join(counts) or "no jobs")
