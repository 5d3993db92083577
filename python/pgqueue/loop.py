"""The worker's loop: claims, hands out, reports, sleeps, and outlives the server."""

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import psycopg

from pgqueue import database
from pgqueue.app import App, Job, Report
from pgqueue.exchange import Answer, Ask, exchange, tell_one_by_one
from pgqueue.heart import Heart
from pgqueue.lanes import Desk, Loop, Threads, watch

log = logging.getLogger("pgqueue")

UNKNOWN_KIND_DELAY = timedelta(seconds=60)


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
        dsn: str = "",
        name: str | None = None,
        concurrency: int = 10,
        batch: int = 500,
        lease: float | None = None,
        poll_interval: float = 5.0,
        shutdown_timeout: float = 30.0,
        listen: bool = True,
        burst: bool = False,
        only_known: bool = False,
        max_jobs: int | None = None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.app = app
        self.queues = dict(queues)
        self.dsn = database.conninfo(dsn)
        host = (name or socket.gethostname()).encode()[:150].decode(errors="ignore")
        self.name = f"{host}:{os.getpid()}:{secrets.token_hex(4)}"
        self.concurrency = concurrency
        self.batch = batch
        self.lease = lease
        self.poll_interval = poll_interval
        self.shutdown_timeout = shutdown_timeout
        self.listen = listen
        self.burst = burst
        self.kinds = list(app.handlers) if only_known else None
        self.left = max_jobs  # to claim; None is without limit
        self.on_tick = on_tick
        self.claimed = 0
        self.stops = 0

        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._desk = Desk(self._ring)
        self._heart = Heart(self.dsn)
        self._threads = Threads(self._desk, self.dsn, concurrency)
        self._loop = Loop(self._desk, self.dsn, concurrency)
        self._unreported: list[Job] = []
        self._credit = dict.fromkeys(self.queues, 0)
        self._dry_until = dict.fromkeys(self.queues, 0.0)
        self._stop_by = float("inf")
        self._is_idle = False

    def stop(self) -> None:
        """Drain and end; the second time release and end. For signal handlers, too."""
        self.stops += 1
        if self.stops == 1:
            self._stop_by = time.monotonic() + self.shutdown_timeout
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._pipe[1], b".")

    def run(self) -> None:
        """Work until stopped, drained (burst) or recycled (max_jobs).

        Outages of any sort are waited for. Raises psycopg's InvalidSchemaName or
        UndefinedFunction where pgqueue is missing or too old.
        """
        over = threading.Event()
        self._heart.open()
        self._threads.open()
        self._loop.open()
        threading.Thread(
            target=watch,
            args=(self._desk, self._threads, self._loop, over),
            daemon=True,
        ).start()
        failures = 0
        try:
            while not self._is_over():
                try:
                    with contextlib.closing(database.connect(self.dsn)) as conn:
                        self._work(conn)
                except database.INCOMPATIBLE:
                    raise
                except psycopg.Error as error:
                    failures += 1
                    log.warning("no server: %s", error)
                    self._sleep(database.backoff(failures))
        finally:
            over.set()
            self._heart.close()
            self._threads.close()
            self._loop.close()

    def _is_over(self) -> bool:
        """Whether nothing is left to do, or no time for it."""
        if self.stops > 1 or time.monotonic() > self._stop_by:
            return True
        if self._heart.held:
            return False
        return self.stops > 0 or self.left == 0 or (self.burst and self._is_idle)

    def _work(self, conn: database.Connection) -> None:
        while True:
            self.on_tick()
            self._collect()
            want = self._want()
            queue = self._next_queue() if want > 0 else None
            if queue is not None or self._unreported:
                self._exchange(conn, queue, want)
            self._is_idle = want > 0 and self._next_queue() is None
            if self._is_over():
                break
            if not (want > 0 and not self._is_idle):
                self._sleep(self.poll_interval if not self._desk.done else 0)

    def _collect(self) -> None:
        done = self._desk.done
        while done:
            self._unreported.append(done.popleft())

    def _want(self) -> int:
        if self.stops:
            return 0
        want = self.concurrency - len(self._heart.held) + len(self._unreported)
        return want if self.left is None else min(want, self.left)

    def _next_queue(self) -> str | None:
        now = time.monotonic()
        return next((q for q in self.queues if self._dry_until[q] <= now), None)

    def _exchange(
        self, conn: database.Connection, queue: str | None, want: int
    ) -> None:
        ask = Ask(
            claim=(queue, self.name, want, self.lease, self.kinds) if queue else None
        )
        try:
            answer = exchange(conn, self._unreported, ask)
        except database.OUTAGE:
            raise
        except psycopg.Error:
            if not self._unreported:
                raise
            tell_one_by_one(conn, self._unreported)
            answer = Answer(since=time.monotonic())
            queue = None
        for job in self._unreported:
            self._heart.held.pop(job.token, None)
        self._unreported.clear()
        if queue is not None and len(answer.jobs) < want:
            self._dry_until[queue] = time.monotonic() + self.poll_interval
        self._hand_out(answer)

    def _hand_out(self, answer: Answer) -> None:
        self._heart.hold(answer.jobs, answer.since)
        self.claimed += len(answer.jobs)
        if self.left is not None:
            self.left -= len(answer.jobs)
        sync: list[Job] = []
        on_loop: list[Job] = []
        for job in answer.jobs:
            handler = self.app.handlers.get(job.kind)
            if handler is None:
                job.report = Report("release", until=UNKNOWN_KIND_DELAY)
                self._unreported.append(job)
                continue
            job.handler = handler
            (on_loop if handler.is_async else sync).append(job)
        self._threads.put(sync)
        self._loop.put(on_loop)

    def _sleep(self, seconds: float) -> None:
        self._desk.is_waiting = True
        if not self._desk.done:
            poll = select.poll()
            poll.register(self._pipe[0], select.POLLIN)
            poll.poll(min(seconds, 1.0) * 1000)
        self._desk.is_waiting = False
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)
