"""The heartbeat: extends the leases of what the worker holds, and hears what it lost.

On a thread and a connection of its own, so that neither a busy loop nor a long handler
keeps it. It also calls maintain(), which may take a while in a large table.
"""

import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterable

import psycopg

from pgqueue import database
from pgqueue.app import Job

log = logging.getLogger("pgqueue")

EXTEND = (
    "select * from pgqueue.extend("
    "%s::bigint[], %s::bigint[], %s::float8 * interval '1 s')"
)
MAINTAIN = "select task, done from pgqueue.maintain()"
MAINTAIN_EVERY = 60.0
LOST = float("-inf")


class Heart:
    """Keeps the leases of `held` alive."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.held: set[Job] = set()
        self.lease = 30.0
        self._conn: database.Connection | None = None
        self._lock = threading.Lock()
        self._nudge = threading.Event()
        self._is_over = False
        self._maintain_at = time.monotonic() + MAINTAIN_EVERY * random.random()

    def open(self) -> None:
        threading.Thread(target=self._run, name="pgqueue-heart", daemon=True).start()

    def close(self) -> None:
        self._is_over = True
        self._nudge.set()

    def hold(self, jobs: Iterable[Job], since: float) -> None:
        """Take in what was claimed at a moment of the monotonic clock."""
        for job in jobs:
            job.expires = since + job.lease
            job.extender = self.extend
            self.held.add(job)
            if job.lease < self.lease:
                self.lease = job.lease
                self._nudge.set()

    def extend(self, job: Job) -> bool:
        """Extend one lease now."""
        self._beat([job])
        return not (job.lost or job.cancelled)

    def _run(self) -> None:
        failures = 0
        while not self._is_over:
            period = self.lease / 3
            due = time.monotonic() + (
                min(period, database.backoff(failures)) if failures else period
            )
            self._nudge.clear()
            if self._nudge.wait(due - time.monotonic()):
                continue  # there is a shorter lease, or it is over
            late = time.monotonic() - due
            if late > self.lease / 3:
                log.warning(
                    "heartbeat %.1f s late: the process stood still, or a handler does"
                    " not let go of the interpreter",
                    late,
                )
            try:
                self._beat(list(self.held))
                if time.monotonic() > self._maintain_at:
                    self._maintain()
                failures = 0
            except psycopg.Error as error:
                failures += 1
                log.warning("heartbeat failed: %s", error)
        if self._conn:
            self._conn.close()

    def _connect(self) -> database.Connection:
        if self._conn is None or self._conn.closed:
            self._conn = database.connect(self.dsn)
        return self._conn

    def _beat(self, jobs: list[Job]) -> None:
        now = time.monotonic()
        by_lease: defaultdict[float, list[Job]] = defaultdict(list)
        for job in jobs:
            # What was extended just now, or is lost for good, needs no round trip.
            if LOST < job.expires < now + job.lease * 0.9 or len(jobs) == 1:
                by_lease[job.lease].append(job)
        for lease, group in by_lease.items():
            for start in range(0, len(group), 1000):
                self._extend(group[start : start + 1000], lease)

    def _extend(self, jobs: list[Job], lease: float) -> None:
        ids, tokens = [job.id for job in jobs], [job.token for job in jobs]
        with self._lock:
            conn, now = self._connect(), time.monotonic()
            with conn.transaction():
                rows = conn.execute(EXTEND, (ids, tokens, lease)).fetchall()
        for job, (_, status) in zip(jobs, rows, strict=True):
            if status == "lost":
                # Unless it was completed just now.
                if job in self.held:
                    job.expires = LOST
            else:
                job.expires = now + lease
                job.cancelled = job.cancelled or status == "cancelled"

    def _maintain(self) -> None:
        self._maintain_at = time.monotonic() + MAINTAIN_EVERY * random.uniform(0.8, 1.2)
        with self._lock:
            conn = self._connect()
            with conn.transaction():
                done = conn.execute(MAINTAIN).fetchall()
        log.debug("maintained: %s", ", ".join(f"{task} {n}" for task, n in done if n))
