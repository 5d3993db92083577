"""Connections for handlers with transaction=True, over sessions that are reused."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
from psycopg import pq

from pgqueue.attempt import Unready
from pgqueue.worker.seldom import Seldom, one_line

log = logging.getLogger("pgqueue")

KEEP = 60.0  # seconds for which an idle session is kept
RESET = (b"discard all", b"set default_transaction_isolation = 'read committed'")
# What an object holds once its session has been given to another.
CLOSED = pq.PGconn.connect_start(b"none")
CLOSED.finish()


def reset(session: pq.abc.PGconn) -> bool:
    """Reset a session, and return whether it still works."""
    with contextlib.suppress(psycopg.OperationalError):  # libpq knows it is lost
        results = (session.exec_(command) for command in RESET)
        return all(result.status == pq.ExecStatus.COMMAND_OK for result in results)
    return False


class Connections:
    """Gives each attempt a new connection object over a session that has been reset.

    No setting, row factory or temporary table of one job is left for the next.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        # With the moment since which they idle; the latest is used first.
        self._idle: list[tuple[float, pq.abc.PGconn]] = []
        self._seldom = Seldom()

    @contextlib.asynccontextmanager
    async def connection(self, is_async: bool) -> AsyncIterator[Any]:
        """Begin a transaction for a handler; it commits unless the handler raises.

        For a `def` handler it blocks the thread, and never awaits.
        """
        if is_async:
            conn = psycopg.AsyncConnection[Any](await asyncio.to_thread(self._session))
            with self._kept(conn):
                async with conn.transaction():
                    yield conn
        else:
            plain = psycopg.Connection[Any](self._session())
            with self._kept(plain), plain.transaction():
                yield plain

    def _session(self) -> pq.abc.PGconn:
        """Reset an idle session that still works; else connect."""
        with contextlib.suppress(IndexError):
            while session := self._idle.pop()[1]:
                if reset(session):
                    return session
                session.finish()
        try:
            conn = psycopg.connect(self._dsn)
        except psycopg.Error as error:
            reason = one_line(error)
            level = self._seldom.level(reason)
            log.log(level, "no connection for a handler, put off: %s", reason)
            raise Unready(reason) from error
        # The object would warn that nobody closed it.
        session, conn.pgconn = conn.pgconn, CLOSED
        session.exec_(RESET[-1])
        return session

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
            if session.transaction_status == pq.TransactionStatus.IDLE:
                self._idle.append((time.monotonic(), session))
            else:
                session.finish()

    def close_idle(self, after: float = KEEP) -> None:
        """Close the sessions that have been idle for this many seconds."""
        with contextlib.suppress(IndexError):
            while self._idle[0][0] <= time.monotonic() - after:
                self._idle.pop(0)[1].finish()
