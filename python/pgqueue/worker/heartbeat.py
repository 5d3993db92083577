"""Extends the leases of the worker's jobs, and learns which are lost or cancelled.

It has a thread and a connection of its own, so that no long claim delays it. It also
sends the progress that handlers report.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

import psycopg

from pgqueue.attempt import Attempt
from pgqueue.client import LeaseLost
from pgqueue.database import Connection
from pgqueue.worker import protocol
from pgqueue.worker.deadline import Server
from pgqueue.worker.seldom import SELDOM, log, one_line
from pgqueue.worker.service import KEEP, Service

LOST = float("-inf")  # as the end of a lease
PROGRESS = 1.0  # seconds between two reports of progress


class Heartbeat(Service):
    """Extends the leases of `held` at the latest after a third of them, and passes the cancelled ones on, once."""

    name = "heartbeat"
    times = 1 / 3  # one call that hangs must not cost a whole lease

    def __init__(self, server: Server, on_cancel: Callable[[Attempt], None]) -> None:
        super().__init__(server)
        self.held: set[Attempt] = set()
        self._on_cancel = on_cancel
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._is_alarmed = False  # some job was cancelled
        self._told: set[Attempt] = set()  # with progress to send

    def wake(self) -> None:
        self._woken.set()

    def hold(self, attempts: Iterable[Attempt], since: float) -> None:
        """Hold what was claimed at a moment of the monotonic clock."""
        for attempt in attempts:
            attempt.expires = since + attempt.lease
            self.held.add(attempt)
            if self.conn is None:
                self.wake()
            if attempt.lease < self._server.lease:
                self._server.lease = attempt.lease
                self.wake()

    def extend(self, attempt: Attempt) -> bool:
        """Extend one lease now, for a handler; without a connection, make one for it."""
        with self._lock:
            own = self.conn
            with nullcontext(own) if own and not own.closed else self.connect() as conn:
                self._extend(conn, [attempt], attempt.lease)
        return not attempt.is_cancelled and time.monotonic() < attempt.expires

    def tell(self, attempt: Attempt) -> None:
        """Send the progress of an attempt soon; from any thread, and as often as it likes."""
        if attempt not in self._told:
            self._told.add(attempt)
            self.wake()

    def look_for_cancelled(self) -> None:
        """Check now which jobs are cancelled; from any thread."""
        self._is_alarmed = True
        self.wake()

    def is_needed(self) -> bool:
        while not (self.held or self._told or self.over.is_set()):
            self._woken.wait()
            self._woken.clear()
        return not self.over.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, but only for a small part of a lease."""
        super().pause(min(seconds, max(0.1, self._server.lease / 10)))

    def work(self, conn: Connection) -> None:
        """Extend until it is over, or nothing was held for a while."""
        used_at = time.monotonic()
        extend_at = time.monotonic()  # after an outage it is overdue
        look_at = tell_at = 0.0
        while not self.over.is_set():
            now = time.monotonic()
            if self.held:
                used_at = now
            elif now > used_at + KEEP:
                return
            # It may be shorter now.
            extend_at = min(extend_at, now + self._server.lease / 3)
            looks = self._is_alarmed and now >= look_at
            if looks or now >= extend_at:
                if now > extend_at + self._server.lease / 3:
                    log.warning(
                        "heartbeat %.1f s late: the process was stopped, or a handler does"
                        " not release the interpreter",
                        now - extend_at,
                        extra=SELDOM,
                    )
                self._is_alarmed = False
                self._extend_all(conn, looks)
                extend_at = time.monotonic() + self._server.lease / 3
                # With many cancellations, each look may be long: it may take a fifth of the time.
                look_at = time.monotonic() + 4 * (time.monotonic() - now)
            if self._told and now >= tell_at:
                tell_at = now + PROGRESS
                self._tell_all(conn)
            until = min(extend_at, look_at if self._is_alarmed else extend_at)
            until = min(until, tell_at if self._told else until)
            self._woken.wait(max(0.0, until - time.monotonic()))
            self._woken.clear()

    def _extend_all(self, conn: Connection, looks: bool) -> None:
        now = time.monotonic()
        by_lease: defaultdict[float, list[Attempt]] = defaultdict(list)
        for attempt in list(self.held):
            # What was claimed or extended just now, or is lost, needs no round trip.
            if LOST < attempt.expires < now + attempt.lease * (1 if looks else 0.9):
                by_lease[attempt.lease].append(attempt)
        for lease, attempts in by_lease.items():
            for start in range(0, len(attempts), 1000):
                with self._lock:
                    self._extend(conn, attempts[start : start + 1000], lease)
        self.succeeded()

    def _extend(self, conn: Connection, attempts: list[Attempt], lease: float) -> None:
        now = time.monotonic()
        statuses = protocol.extend(conn, attempts, lease)
        for attempt, status in zip(attempts, statuses, strict=True):
            if status != "lost":
                attempt.expires = now + lease
                if status == "cancelled" and not attempt.is_cancelled:
                    attempt.is_cancelled = True
                    self._on_cancel(attempt)
            elif attempt in self.held:  # and has not just been completed
                attempt.expires = LOST

    def _tell_all(self, conn: Connection) -> None:
        told = list(self._told)
        self._told.difference_update(told)  # before their progress is read
        # What has ended meanwhile no longer has a row.
        told = [attempt for attempt in told if attempt in self.held]
        try:
            with self._lock:
                protocol.one_by_one(partial(protocol.progress, conn), told, drop)
        except psycopg.Error:
            self._told.update(told)  # for the next connection
            raise


def drop(attempt: Attempt, error: psycopg.Error) -> None:
    """Log that progress was refused, and send it no more."""
    if not isinstance(error, LeaseLost):  # which extend() will notice
        reason, extra = one_line(error), {"seldom": attempt.id}
        log.warning("%s: progress was refused: %s", attempt, reason, extra=extra)
