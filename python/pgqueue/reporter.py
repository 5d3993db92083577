"""While jobs are quick: reports on a connection of their own.

One exchange then keeps one of the server's processes busy for longer than the handlers
take. So the loop only claims, and what is done is reported beside it.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterable

import psycopg

from pgqueue import database
from pgqueue.app import Job
from pgqueue.desk import Desk
from pgqueue.exchange import Ask, exchange, tell
from pgqueue.heart import Heart
from pgqueue.pace import Pace
from pgqueue.turns import Turns

log = logging.getLogger("pgqueue")

GATHER = 0.003  # seconds for which a busy worker lets reports gather


class Reporter:
    """A thread that comes when jobs are quick, and goes when they are not."""

    def __init__(
        self, dsn: str, desk: Desk, heart: Heart, pace: Pace, turns: Turns
    ) -> None:
        self.dsn = dsn
        self.desk = desk
        self.heart = heart
        self.pace = pace
        self.turns = turns
        self._thread = threading.Thread(target=self._run)
        self._is_over = False

    @property
    def is_there(self) -> bool:
        """Whether what is done is the reporter's to take, and the jobs' to count."""
        return self._thread.is_alive()

    def come(self) -> None:
        """Start it, unless it is there or was closed."""
        if not self.is_there and not self._is_over:
            self._thread = threading.Thread(
                target=self._run, name="pgqueue-reporter", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End it after what is under way, or after five seconds."""
        self._is_over = True
        if self.is_there:
            self._thread.join(5)

    def let_go(self, jobs: Iterable[Job]) -> None:
        """Forget jobs that were reported, by whomever."""
        for job in jobs:
            self.heart.held.discard(job)
            if job.report.verb in ("fail", "release"):
                self.turns.refresh()  # it may be due before the loop wakes

    def _run(self) -> None:
        try:
            with contextlib.closing(database.connect(self.dsn)) as conn:
                while self.pace.is_quick and not self._is_over:
                    if not self._report(conn):
                        time.sleep(GATHER)
        except psycopg.Error as error:
            # The loop does it then, or sees that there is no server.
            log.info("no reports beside the loop: %s", str(error).strip())

    def _report(self, conn: database.Connection) -> int:
        done = self.desk.done
        jobs = [done.popleft() for _ in range(len(done))]
        self.pace.count(len(jobs))
        if not jobs:
            return 0
        try:
            answer = exchange(conn, jobs, Ask())
        except psycopg.Error:
            done.extendleft(jobs)
            raise
        tell(jobs, answer)
        self.let_go(jobs)
        if self.desk.is_waiting:
            self.desk.bell.ring()  # it may have been the last
        return len(jobs)
