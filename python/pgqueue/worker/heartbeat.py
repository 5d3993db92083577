"""Extends the leases of the worker's jobs, and learns which are lost or cancelled.

It has a thread and a connection of its own, so that no long claim delays it.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable

from pgqueue import database
from pgqueue.attempt import Attempt
from pgqueue.worker import protocol
from pgqueue.worker.service import Service

log = logging.getLogger("pgqueue")

LOST = float("-inf")  # as the end of a lease


class Heartbeat(Service):
    """Extends the leases of `held` at a third of their length."""

    name = "heartbeat"

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.held: set[Attempt] = set()
        self._lease = 30.0
        self._conn: database.Connection | None = None
        self._lock = threading.Lock()
        self._woken = threading.Event()

    def wake(self) -> None:
        self._woken.set()

    def hold(self, attempts: Iterable[Attempt], since: float) -> None:
        """Hold what was claimed at a moment of the monotonic clock."""
        for attempt in attempts:
            attempt.expires = since + attempt.lease
            attempt.extender = self.extend
            self.held.add(attempt)
            if attempt.lease < self._lease:
                self._lease = attempt.lease
                self.wake()

    def extend(self, attempt: Attempt) -> bool:
        """Extend one lease now, for a handler; without a connection, make one for it."""
        with self._lock:
            conn = self._conn
            if conn is None or conn.closed:
                with database.connect(self.dsn) as conn:
                    self._extend(conn, [attempt], attempt.lease)
            else:
                self._extend(conn, [attempt], attempt.lease)
        return not attempt.is_cancelled and time.monotonic() < attempt.expires

    def work(self, conn: database.Connection) -> None:
        self._conn = conn
        self._extend_all(conn)  # after an outage it is overdue
        while not self.over.is_set():
            due = time.monotonic() + self._lease / 3
            if self._woken.wait(due - time.monotonic()):
                self._woken.clear()
                continue  # there is a shorter lease, or it is over
            if (late := time.monotonic() - due) > self._lease / 3:
                log.warning(
                    "heartbeat %.1f s late: the process stood still, or a handler does"
                    " not let go of the interpreter",
                    late,
                )
            self._extend_all(conn)

    def _extend_all(self, conn: database.Connection) -> None:
        now = time.monotonic()
        by_lease: defaultdict[float, list[Attempt]] = defaultdict(list)
        for attempt in list(self.held):
            # What was claimed or extended just now, or is lost, needs no round trip.
            if LOST < attempt.expires < now + attempt.lease * 0.9:
                by_lease[attempt.lease].append(attempt)
        for lease, attempts in by_lease.items():
            for start in range(0, len(attempts), 1000):
                with self._lock:
                    self._extend(conn, attempts[start : start + 1000], lease)
        self.succeeded()

    def _extend(
        self, conn: database.Connection, attempts: list[Attempt], lease: float
    ) -> None:
        now = time.monotonic()
        statuses = protocol.extend(conn, attempts, lease)
        for attempt, status in zip(attempts, statuses, strict=True):
            if status != "lost":
                attempt.expires = now + lease
                attempt.is_cancelled = attempt.is_cancelled or status == "cancelled"
            elif attempt in self.held:  # and has not just been completed
                attempt.expires = LOST
