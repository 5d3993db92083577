"""Reports to the server how attempts ended: many in one call, each with its outcome."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

import psycopg

from pgqueue import database
from pgqueue.attempt import LARGEST_RESULT, LOST, Attempt, Outcome
from pgqueue.worker import protocol
from pgqueue.worker.prefetch import GATHER, Prefetch
from pgqueue.worker.service import Service

log = logging.getLogger("pgqueue")

MAX_BATCH = 2000  # attempts in one call
LEVELS = {"dead": logging.ERROR, "lost": logging.WARNING, "retry": logging.WARNING}


class Finisher(Service):
    """Reports what `put` was given, then passes it with the statuses to `on_commit`."""

    name = "finisher"

    def __init__(
        self,
        dsn: str,
        prefetch: Prefetch,
        on_commit: Callable[[list[Attempt], set[str]], None],
    ) -> None:
        super().__init__(dsn)
        self.statuses: Counter[str] = Counter()
        self._prefetch = prefetch
        self._on_commit = on_commit
        self._ended: SimpleQueue[Attempt | None] = SimpleQueue()
        self._batch: list[Attempt] = []  # taken, and not yet reported

    def put(self, attempt: Attempt) -> None:
        self._ended.put(attempt)

    def wake(self) -> None:
        self._ended.put(None)

    def work(self, conn: database.Connection) -> None:
        while self._batch or not (self.over.is_set() and self._ended.empty()):
            self._gather()
            if self._batch:
                self._report(conn, self._batch)
                self._batch = []

    def _gather(self) -> None:
        """Take what has ended; wait for the first."""
        batch, before = self._batch, len(self._batch)
        if not batch and (first := self._ended.get()):
            batch.append(first)
            if self._prefetch.is_quick and not self.over.is_set():
                time.sleep(GATHER)
        # A message holds at most 1 GB; what an outage has left in the batch counts, too.
        size = sum(len(attempt.outcome.text or "") for attempt in batch)
        with suppress(Empty):
            while len(batch) < MAX_BATCH and size < LARGEST_RESULT:
                if attempt := self._ended.get_nowait():
                    batch.append(attempt)
                    size += len(attempt.outcome.text or "")
        self._prefetch.count(len(batch) - before)

    def _report(self, conn: database.Connection, batch: list[Attempt]) -> None:
        to_finish = [a for a in batch if a.outcome.name != "none"]
        statuses = self._finish(conn, to_finish) if to_finish else {}
        statuses |= {a.id: "lost" for a in batch if a.outcome is LOST}
        self.succeeded()
        self.statuses.update(statuses.get(a.id, "completed") for a in batch)
        self._on_commit(batch, set(statuses.values()))
        least = logging.DEBUG if self._prefetch.is_quick else logging.INFO
        if statuses or log.isEnabledFor(least):
            for attempt in batch:
                self._log(attempt, statuses.get(attempt.id, "completed"), least)

    def _finish(
        self, conn: database.Connection, attempts: list[Attempt]
    ) -> dict[int, str]:
        """Finish a batch; if it is refused, each alone, and fail the one to blame."""
        try:
            return protocol.finish(conn, attempts)
        except psycopg.Error as error:
            if database.is_outage(error):
                raise
            if len(attempts) > 1:
                statuses: dict[int, str] = {}
                for attempt in attempts:
                    statuses |= self._finish(conn, [attempt])
                return statuses
            text = f"{attempts[0].outcome.name} was refused: {str(error).strip()}"
            attempts[0].outcome = Outcome("fail", text, error=error)
            return protocol.finish(conn, attempts)

    def _log(self, attempt: Attempt, status: str, least: int) -> None:
        level = LEVELS.get(status, least)
        if not log.isEnabledFor(level):
            return
        outcome = attempt.outcome
        has_error = outcome.name in ("fail", "reject")
        summary = (outcome.text or "").partition("\n")[0] if has_error else ""
        taken = time.monotonic() - attempt.started if attempt.started else 0.0
        extra = {
            "job_id": attempt.id,
            "kind": attempt.kind,
            "queue": attempt.queue,
            "attempt": attempt.number,
            "token": attempt.token,
            "ms": round(taken * 1000, 1),
        }
        text = f"{attempt}: {status}" + (f": {summary}" if summary else "")
        log.log(level, "%s", text, extra=extra, exc_info=outcome.error)
