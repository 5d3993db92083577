"""The worker's loop: claims, hands out, reports, sleeps, and outlives the server."""

import contextlib
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import psycopg

from pgqueue import database
from pgqueue.app import App, Job, Report
from pgqueue.desk import Bell, Desk
from pgqueue.exchange import Answer, Ask, exchange, tell, tell_one_by_one
from pgqueue.heart import Heart
from pgqueue.lanes import Tasks, Threads, watch
from pgqueue.pace import Pace
from pgqueue.reporter import GATHER, Reporter
from pgqueue.turns import Turns

log = logging.getLogger("pgqueue")

UNKNOWN_KIND_DELAY = timedelta(seconds=60)
STALE = 1.0  # seconds after which others shall have what nobody here begins


class Worker:
    """Runs the jobs of some queues with the handlers of an app.

    `queues` maps names to weights. Times are in seconds. `on_tick` is called about
    every second as long as the loop lives.
    """

    def __init__(
        self,
        app: App,
        queues: Mapping[str, int],
        *,
        dsn: str | None = None,
        name: str | None = None,
        concurrency: int = 10,
        batch: int = 1000,
        lease: float | None = None,
        poll_interval: float = 5.0,
        shutdown_timeout: float = 30.0,
        listen: bool = True,
        burst: bool = False,
        only_known: bool = False,
        max_jobs: int | None = None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        host = (name or socket.gethostname()).encode()[:150].decode(errors="ignore")
        self.name = f"{host}:{os.getpid()}:{secrets.token_hex(4)}"
        self.app = app
        self.dsn = database.conninfo(dsn)
        self.lease = lease
        self.poll_interval = poll_interval
        self.shutdown_timeout = shutdown_timeout
        self.listen = listen and not burst
        self.burst = burst
        self.kinds = list(app.handlers) if only_known else None
        self.on_tick = on_tick
        self.stops = 0
        self.gave_up = False  # whether handlers still run whose jobs were given back

        self._bell = Bell()
        self._desk = Desk(self._bell)
        self._heart = Heart(self.dsn)
        self._threads = Threads(self._desk, self.dsn, concurrency)
        self._tasks = Tasks(self._desk, self.dsn, concurrency)
        self._turns = Turns(queues)
        self._pace = Pace(concurrency, batch, max_jobs)
        self._reporter = Reporter(
            self.dsn, self._desk, self._heart, self._pace, self._turns
        )
        self._claimed: list[Job] = []  # and not yet in a lane
        self._unreported: list[Job] = []
        self._stop_by = float("inf")
        self._failures = 0
        self._rested = -1  # after which change it was last safe to sleep
        self._complained: dict[str, float] = {}

    def stop(self) -> None:
        """Drain and end; the second time release and end. For signal handlers, too."""
        self.stops += 1
        if self.stops == 1:
            self._stop_by = time.monotonic() + self.shutdown_timeout
        self._bell.ring()

    def run(self) -> None:
        """Work until stopped, drained (burst) or recycled (max_jobs).

        Waits for the end of any outage. Raises psycopg's InvalidSchemaName or
        UndefinedFunction where pgqueue is missing or too old.
        """
        over = threading.Event()
        self._heart.open()
        self._threads.open()
        self._tasks.open()
        watched = (self._desk, self._threads, self._tasks, over)
        threading.Thread(target=watch, args=watched, daemon=True).start()
        try:
            while not self._is_over():
                try:
                    with contextlib.closing(database.connect(self.dsn)) as conn:
                        self._work(conn)
                except database.INCOMPATIBLE:
                    raise
                except psycopg.Error as error:
                    self._failures += 1
                    log.warning("no server: %s", str(error).strip())
                    self._wait_out(database.backoff(self._failures))
        finally:
            over.set()
            self._reporter.close()
            self._heart.close()
            self._threads.close()
            self._tasks.close()

    def _work(self, conn: database.Connection) -> None:
        """Work with one connection until it breaks or all is over."""
        self._turns.refresh()
        self._rested = -1  # on this connection never
        listens = self._start_listening(conn)
        while True:
            self.on_tick()
            self._collect()
            if self.stops:
                self._reporter.close()
            elif self._pace.is_quick:
                self._reporter.come()
            if self.stops > 1 or time.monotonic() > self._stop_by:
                self._release_all(conn)
                return
            want = 0 if self.stops else self._want()
            # An idle worker that heard nothing only looks: where a walk is dear, one is enough.
            heard_nothing = self._rested == self._turns.changes
            if want > 0 and heard_nothing and not self._turns.is_settled:
                self._rest(conn, listens)
            if want > 0 and (queue := self._turns.next()) is not None:
                answer = self._exchange(conn, Ask(), queue, want)
                if len(answer.jobs) < want:
                    self._turns.found_empty(queue)
            elif want > 0 and not self._turns.is_settled:
                self._probe(conn, want, listens)
            elif self._unreported:
                self._exchange(conn, Ask())
            if self._is_over():
                return
            self._sleep(conn, want)

    def _probe(self, conn: database.Connection, want: int, listens: bool) -> None:
        """Ask all queues, so that it is safe to sleep when they have no more."""
        found = 0
        for queue in self._turns.in_turn():
            answer = self._exchange(conn, Ask(), queue, want - found)
            found += len(answer.jobs)
            if found >= want:
                return
        self._rest(conn, listens)

    def _rest(self, conn: database.Connection, listens: bool) -> None:
        """Settle for as long as it is safe to sleep."""
        changes = self._turns.changes
        ask = Ask(rest=(self._turns.names, self.kinds, listens))
        seconds = self._exchange(conn, ask).rest
        if seconds == 0:
            self._rested = -1
            return
        pause = self.poll_interval * random.uniform(0.8, 1.2)
        self._turns.settle(pause if seconds is None else min(pause, seconds), changes)
        self._rested = changes

    def _exchange(
        self,
        conn: database.Connection,
        ask: Ask,
        queue: str | None = None,
        want: int = 0,
    ) -> Answer:
        if queue is not None:
            ask.claim = (queue, self.name, want, self.lease, self.kinds)
        reported = self._unreported
        try:
            answer = exchange(conn, reported, ask, self._put)
            tell(reported, answer)
        except database.OUTAGE:
            raise
        except psycopg.Error:
            if not reported:
                raise
            tell_one_by_one(conn, reported)
            answer = exchange(conn, (), ask)
        self._failures = 0
        self._reporter.let_go(reported)
        self._unreported = []
        self._hand_out(answer)
        return answer

    def _hand_out(self, answer: Answer) -> None:
        self._heart.hold(answer.jobs, answer.since)
        self._pace.claimed(len(answer.jobs))
        for job in answer.jobs:
            handler = self.app.handlers.get(job.kind)
            if handler is None:
                self._refuse(job)
                continue
            job.handler = handler
            self._claimed.append(job)
        # Quick handlers start when the next exchange is under way: they would keep the
        # interpreter from writing it.
        if not self._pace.is_quick:
            self._put()

    def _put(self) -> None:
        """Let handlers have what was claimed."""
        jobs, self._claimed = self._claimed, []
        if for_threads := [job for job in jobs if not job.handler.is_async]:
            self._threads.put(for_threads)
        if for_tasks := [job for job in jobs if job.handler.is_async]:
            self._tasks.put(for_tasks)

    def _refuse(self, job: Job) -> None:
        """Let others have a job of a kind unknown here, but not at once."""
        job.report = Report("release", until=UNKNOWN_KIND_DELAY)
        self._unreported.append(job)
        now = time.monotonic()
        if now > self._complained.get(job.kind, float("-inf")) + 60:
            self._complained[job.kind] = now
            log.warning(
                "no handler for the kind %r of job %s: put off", job.kind, job.id
            )

    def _want(self) -> int:
        lanes = len(self._threads) + len(self._tasks)
        unfinished = len(self._claimed) + lanes + len(self._desk.running)
        return self._pace.want(unfinished, len(self._desk.done))

    def _collect(self) -> None:
        """Take what is done, and take back what nobody here will begin soon."""
        done, now, before = self._desk.done, time.monotonic(), len(self._unreported)
        if not self._reporter.is_there:
            while done:
                self._unreported.append(done.popleft())
            self._pace.count(len(self._unreported) - before)
        for lane in (self._threads, self._tasks):
            if len(lane) and (self.stops or now > lane.pulled_at + STALE):
                for job in lane.take_back():
                    job.report = Report("release")
                    self._unreported.append(job)

    def _is_over(self) -> bool:
        """Whether nothing is left to do, or no time for it."""
        if self.stops > 1 or time.monotonic() > self._stop_by:
            return not self._heart.held or self._failures > 0
        if self._heart.held:
            return False
        return bool(
            self.stops
            or self._pace.left == 0
            or (self.burst and self._turns.is_settled)
        )

    def _release_all(self, conn: database.Connection) -> None:
        """Report what is done and give back the rest; what runs on cannot complete."""
        rest = list(self._heart.held.difference(self._unreported))
        self.gave_up = bool(rest)
        for job in rest:
            job.report = Report("release")
        log.warning("giving back %s unfinished jobs", len(rest))
        self._unreported += rest
        self._exchange(conn, Ask())

    def _start_listening(self, conn: database.Connection) -> bool:
        if not self.listen:
            return False
        if conn.prepare_threshold == 0 and database.hears(conn, self.dsn):
            conn.add_notify_handler(lambda _: self._turns.refresh())
            conn.execute(f"listen {database.CHANNEL}")
            return True
        self.listen = False  # nor will it after the next reconnect
        log.warning(
            "NOTIFY does not arrive, as behind a transaction pooler: polling every %s s",
            self.poll_interval,
        )
        return False

    def _sleep(self, conn: database.Connection, want: int) -> None:
        """Sleep until there is something to report, to hear, or to ask for."""
        now = time.monotonic()
        is_busy = len(self._threads) + len(self._tasks) > 0
        if want > 0:
            timeout = self._turns.quiet_until - now
        else:
            timeout = 1.0
        if timeout <= 0 or self._unreported:
            return
        self._put()
        self._desk.is_waiting = True
        if not self._desk.done:
            if self._bell.wait(min(timeout, 1.0), conn.fileno()):
                conn.pgconn.consume_input()
                while conn.pgconn.notifies():
                    self._turns.refresh()
        self._desk.is_waiting = False
        if self._pace.is_quick and (is_busy or self._desk.done):
            time.sleep(GATHER)

    def _wait_out(self, seconds: float) -> None:
        self._put()
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._is_over():
            self.on_tick()
            self._bell.wait(min(left, 1.0))
