"""Connections for handlers with transaction=True, over sessions that are reused."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
from psycopg import pq

from pgqueue import database
from pgqueue.attempt import Attempt, Unready
from pgqueue.worker.deadline import NEVER, Deadline
from pgqueue.worker.seldom import Seldom, one_line

log = logging.getLogger("pgqueue")

KEEP = 60.0  # seconds for which an idle session is kept
# What an object holds once its session has been given to another.
CLOSED = pq.PGconn.connect_start(b"none")
CLOSED.finish()


def reset(session: pq.abc.PGconn) -> bool:
    """Reset a session, and return whether it still works."""
    with contextlib.suppress(psycopg.OperationalError):  # libpq knows it is lost
        return session.exec_(b"discard all").status == pq.ExecStatus.COMMAND_OK
    return False


class Connections(Deadline):
    """Gives each attempt a new connection object over a session that has been reset.

    No setting, row factory or temporary table of one job is left for the next. Behind a pooler
    a reset might be of a session that others use: there each attempt connects, and all that is
    set is for one transaction.
    """

    def __init__(self, dsn: str, patience: Callable[[], float]) -> None:
        super().__init__(dsn, patience)
        # With the moment since which they idle; the latest is used first.
        self._idle: list[tuple[float, pq.abc.PGconn]] = []
        self._is_pooled = False
        self._seldom = Seldom()

    @contextlib.asynccontextmanager
    async def connection(self, attempt: Attempt) -> AsyncIterator[Any]:
        """Begin a transaction for a handler; it commits unless the handler raises.

        For a `def` handler it blocks the thread, and never awaits.
        """
        try:
            if attempt.task.is_async:
                session = await asyncio.to_thread(self._session, attempt)
                conn = psycopg.AsyncConnection[Any](session)
                with self._kept(conn):
                    await conn.set_isolation_level(database.READ_COMMITTED)
                    async with conn.transaction():
                        attempt.waits_since = NEVER
                        yield conn
            else:
                plain = psycopg.Connection[Any](self._session(attempt))
                plain.isolation_level = database.READ_COMMITTED
                with self._kept(plain), plain.transaction():
                    attempt.waits_since = NEVER
                    yield plain
        finally:
            self.forget(attempt)

    def _session(self, attempt: Attempt) -> pq.abc.PGconn:
        """Reset an idle session that still works; else connect."""
        with contextlib.suppress(IndexError):
            while session := self._idle.pop()[1]:
                self.watch(attempt, session)
                if reset(session):
                    return session
                session.finish()
        try:
            conn = psycopg.connect(
                self.dsn, autocommit=True, connect_timeout=self.connect_timeout()
            )
            self.watch(attempt, conn.pgconn)
            self._is_pooled = database.is_pooled(conn)
        except psycopg.Error as error:
            reason = one_line(error)
            level = self._seldom.level(reason)
            log.log(level, "no connection for a handler, put off: %s", reason)
            raise Unready(reason) from error
        # The object would warn that nobody closed it.
        session, conn.pgconn = conn.pgconn, CLOSED
        return session

    def watch(self, owner: Attempt, session: pq.abc.PGconn) -> None:
        """Watch our own statements, not the handler's."""
        self.forget(owner)
        owner.waits_since = time.monotonic()
        super().watch(owner, session)

    def give_up(self, owner: Attempt, after: float) -> None:
        level, extra = self._seldom.level("late"), owner.fields
        log.log(
            level,
            "%s: no answer in %g s: its connection is given up",
            owner,
            after,
            extra=extra,
        )
        self.close_idle(after=0)  # which will not be better

    @contextlib.contextmanager
    def _kept(
        self, conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
    ) -> Iterator[None]:
        """Keep the session of a connection afterwards, unless it is broken."""
        conn.prepare_threshold = None
        try:
            yield
        finally:
            session, conn.pgconn = conn.pgconn, CLOSED  # the handler may have kept it
            is_idle = session.transaction_status == pq.TransactionStatus.IDLE
            if is_idle and not self._is_pooled:
                self._idle.append((time.monotonic(), session))
            else:
                session.finish()

    def close_idle(self, after: float = KEEP) -> None:
        """Close the sessions that have been idle for this many seconds."""
        with contextlib.suppress(IndexError):
            while self._idle[0][0] <= time.monotonic() - after:
                self._idle.pop(0)[1].finish()
