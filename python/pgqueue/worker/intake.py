"""What the worker claims, and what it begins of that."""

import logging
import math
from datetime import timedelta

import psycopg

from pgqueue import database
from pgqueue.attempt import NO_TASK, Attempt, Outcome
from pgqueue.worker import protocol
from pgqueue.worker.executor import Executor
from pgqueue.worker.finisher import Finisher
from pgqueue.worker.heartbeat import Heartbeat
from pgqueue.worker.prefetch import Prefetch
from pgqueue.worker.terms import Terms

log = logging.getLogger("pgqueue")

UNKNOWN_KIND = Outcome("release", "no handler for its kind", timedelta(minutes=1))


class Intake:
    """Says to the dispatcher what to claim, and takes it."""

    def __init__(
        self,
        terms: Terms,
        prefetch: Prefetch,
        executor: Executor,
        heartbeat: Heartbeat,
        finisher: Finisher,
    ) -> None:
        self._app = terms.app
        self._only_known = terms.only_known
        self._timeout = terms.timeout  # for handlers without one of their own
        self.prefetch = prefetch
        self._executor = executor
        self.heartbeat = heartbeat
        self._finisher = finisher

    def kinds(self) -> list[str] | None:
        """Return the kinds to claim; None is all."""
        if self._executor.loop.is_blocked:
            return [kind for kind, task in self._app.tasks.items() if not task.is_async]
        return list(self._app.tasks) if self._only_known else None

    def want(self) -> int:
        """Return how many jobs to claim: 0 while the finisher has fallen behind."""
        if len(self.heartbeat.held) > 2 * (
            self.prefetch.batch + self.prefetch.concurrency
        ):
            return 0
        return self.prefetch.want(self._executor.unfinished)

    def begin(
        self,
        conn: database.Connection,
        attempts: list[Attempt],
        since: float,
        is_paused: bool,
    ) -> None:
        """Run what was claimed at a moment of the monotonic clock; not if it is paused."""
        self.heartbeat.hold(attempts, since)
        self.prefetch.claimed(len(attempts))
        free = self.prefetch.concurrency - self._executor.unfinished
        last = [a for a in attempts if a.number >= a.max_attempts]
        if last:
            self.prefetch.saw_last_attempts()
            attempts = last + [a for a in attempts if a.number < a.max_attempts]
        if not_ahead := set(last[max(0, free) :]):
            attempts = [a for a in attempts if a not in not_ahead]
            self._give_back_at_once(conn, list(not_ahead))
        if payloads := [len(a.payload) for a in attempts if a.payload]:
            self.prefetch.weigh(len(payloads), sum(payloads))
        if attempts and not self._finisher.is_connected:
            self._finisher.wake()  # it will be needed
        for attempt in attempts:
            # Claimed meanwhile, or never to wait here: leave it to other workers.
            if is_paused or not attempt.payload:
                self._give_back(attempt)
            elif task := self._app.find(attempt.kind):
                attempt.task = task
                timeout = task.policy.timeout or self._timeout
                attempt.timeout = None if timeout == math.inf else timeout
            else:
                self._put_off(attempt)
        self._executor.submit(a for a in attempts if a.task is not NO_TASK)

    def _give_back_at_once(
        self, conn: database.Connection, attempts: list[Attempt]
    ) -> None:
        """Give back last attempts before anything runs: in a worker that is killed they would die."""
        try:
            protocol.finish(conn, attempts)
        except psycopg.Error:  # the finisher tries again, and says what is wrong
            for attempt in attempts:
                self._give_back(attempt)
        else:
            self.prefetch.claimed(-len(attempts))
            self.heartbeat.held.difference_update(attempts)

    def _give_back(self, attempt: Attempt) -> None:
        self.prefetch.claimed(-1)
        self._finisher.put(attempt)

    def _put_off(self, attempt: Attempt) -> None:
        """Leave a job of an unknown kind to other workers, but not at once."""
        attempt.outcome = UNKNOWN_KIND
        self._finisher.put(attempt)
        extra = {"seldom": attempt.kind}
        log.warning("no handler for the kind of %s: put off", attempt, extra=extra)
