"""Reports to the server how attempts ended: many in one call, each with its outcome."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import psycopg

from pgqueue.attempt import LARGEST_RESULT, LOST, SUSPENDED, Attempt, Outcome
from pgqueue.database import Connection
from pgqueue.drivers import run_without_loop
from pgqueue.judge import is_final, summary
from pgqueue.policy import Retry
from pgqueue.running import check_result
from pgqueue.terminal import printable
from pgqueue.worker import protocol
from pgqueue.worker.deadline import Server
from pgqueue.worker.seldom import TRACE, log
from pgqueue.worker.service import KEEP, Service
from pgqueue.worker.turns import GATHER, Turns

MAX_BATCH = 2000  # attempts in one call
COUNT = 10.0  # seconds between two counts of jobs too quick for a line each
OnCommit = Callable[[list[Attempt], set[str]], None]
LEVELS = {"dead": logging.ERROR, "lost": logging.WARNING, "retry": logging.WARNING}


class Finisher(Service):
    """Reports what `put` was given, then passes it with the statuses to `on_commit`."""

    name = "finisher"

    def __init__(self, server: Server, turns: Turns, on_commit: OnCommit) -> None:
        super().__init__(server)
        self.statuses: Counter[str] = Counter()
        self._turns = turns
        self._on_commit = on_commit
        self._ended: SimpleQueue[Attempt | None] = SimpleQueue()
        self._batch: list[Attempt] = []  # taken, and not yet reported
        self._is_unsure = False  # whether it was reported before a break
        self._quick = 0  # jobs that completed without a line each
        self._counted, self._counted_at = 0, time.monotonic()

    def put(self, attempt: Attempt) -> None:
        outcome = attempt.outcome
        if outcome.error is not None and outcome.name in ("complete", "none"):
            warn(attempt, outcome.error)
        self._ended.put(attempt)
        self._turns.slot_freed()

    def wake(self) -> None:
        self._ended.put(None)

    def is_needed(self) -> bool:
        if not self._batch and (first := self._ended.get()):
            self._batch.append(first)
        return bool(self._batch) or not self.over.is_set()

    def goes_on(self) -> bool:
        has_left = bool(self._batch) or not self._ended.empty()
        return super().goes_on() or (has_left and not self._failures)

    def work(self, conn: Connection) -> None:
        """Report until it is over, or nothing has ended for a while."""
        used_at = time.monotonic()
        while self._batch or not (self.over.is_set() and self._ended.empty()):
            self._gather()
            if self._batch:
                used_at = time.monotonic()
                self._report(conn, self._batch)
                self._batch = []
            elif time.monotonic() > used_at + KEEP:
                return

    def _gather(self) -> None:
        """Take what has ended; wait for the first."""
        batch, before = self._batch, len(self._batch)
        if not batch:
            self.succeeded()
            with suppress(Empty):
                if first := self._ended.get(timeout=KEEP):
                    batch.append(first)
                    if self._turns.is_quick and not self.over.is_set():
                        time.sleep(GATHER)
        # A message holds at most 1 GB; what an outage has left in the batch also counts.
        size = sum(len(attempt.outcome.text or "") for attempt in batch)
        with suppress(Empty):
            while len(batch) < MAX_BATCH and size < LARGEST_RESULT:
                if attempt := self._ended.get_nowait():
                    batch.append(attempt)
                    size += len(attempt.outcome.text or "")
        self._turns.count(len(batch) - before)

    def _report(self, conn: Connection, batch: list[Attempt]) -> None:
        is_again, self._is_unsure = self._is_unsure, True
        statuses: dict[int, str] = {}
        to_finish = [a for a in batch if a.outcome.name != "none"]
        if conn.info.parameter_status("server_encoding") != "UTF8":
            for attempt in to_finish:
                if error := run_without_loop(check_result(conn, attempt.outcome)):
                    warn(attempt, error)
        finish, refused = partial(protocol.finish, conn), partial(fail, conn)
        for found in protocol.one_by_one(finish, to_finish, refused):
            statuses |= found
        self._is_unsure = False
        if is_again:  # those that are lost now may have ended by the first report
            lost = [i for i, status in statuses.items() if status == "lost"]
            statuses |= dict.fromkeys(lost, "reported")
        known = (a for a in batch if a.outcome in (LOST, SUSPENDED))
        statuses |= {a.id: a.outcome.status for a in known}
        ended = Counter(statuses.get(a.id, "completed") for a in batch)
        self.statuses.update(ended)
        self._on_commit(batch, set(statuses.values()))
        least = logging.DEBUG if self._turns.is_quick else logging.INFO
        if not log.isEnabledFor(least):
            self._quick += ended["completed"]
        if statuses or log.isEnabledFor(least):
            for attempt in batch:
                self._log(attempt, statuses.get(attempt.id, "completed"), least)

    def count_quick(self, is_last: bool = False) -> None:
        """Log now and then how many jobs had no line of their own; not in its own thread."""
        now, quick = time.monotonic(), self._quick
        if quick == self._counted:
            self._counted_at = now
        elif is_last or now > self._counted_at + COUNT:
            text = "%s jobs completed in %.0f s, too quick for a line each"
            log.info(text, quick - self._counted, now - self._counted_at)
            self._counted, self._counted_at = quick, now

    def _log(self, attempt: Attempt, status: str, least: int) -> None:
        outcome, level = attempt.outcome, LEVELS.get(status, least)
        if status == "retry" and isinstance(outcome.error, Retry):
            level = least  # as the handler planned
        elif status == "released" and not attempt.started:
            level = logging.DEBUG  # nothing happened to it
        if not log.isEnabledFor(level):
            return
        has_error = outcome.name in ("fail", "reject")
        text = (outcome.text or "") if has_error else ""
        first, shown = text.partition("\n")[0], text.partition("\n\n")[2]
        if status == "lost":
            first = "its lease had expired"
        elif status == "reported":
            first = "the connection broke before the answer"
        why = f": {printable(first)}" if first else ""
        error = outcome.error if level > logging.INFO else None
        # As a tuple: logging asks an exception itself for its truth, which may raise.
        shows = None if error is None else (type(error), error, error.__traceback__)
        # Our formatters need not show the error again, which takes as long as the job.
        extra = {TRACE: shown if level > logging.INFO else ""}
        log.log(level, "%s: %s%s", attempt, status, why, extra=extra, exc_info=shows)


def warn(attempt: Attempt, error: BaseException) -> None:
    reason = printable(summary(error))
    log.warning("%s: its result is not stored: %s", attempt, reason)


def fail(conn: Connection, attempt: Attempt, error: psycopg.Error) -> dict[int, str]:
    """Fail an attempt whose own outcome is refused."""
    outcome = attempt.outcome
    text = outcome.text if outcome.name in ("fail", "reject") else None
    if text and isinstance(error, psycopg.errors.UntranslatableCharacter):
        # The database's encoding lacks a character of it, such as the ellipsis of a long line.
        outcome.text = text.encode("ascii", "backslashreplace").decode()
    else:
        text = f"{outcome.name} was refused: {str(error).strip()}"
        is_last = outcome.name == "reject" or is_final(error, attempt)
        name: Any = "reject" if is_last else "fail"
        attempt.outcome = Outcome(name, text, error=error)
    return protocol.finish(conn, [attempt])
