"""Sessions for handlers with transaction=True; none is kept that nobody uses for long."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
from psycopg import pq

from pgqueue.attempt import Unready

KEEP = 60.0  # seconds
READ_COMMITTED = psycopg.IsolationLevel.READ_COMMITTED
# What is left in an object whose session has gone to another.
CLOSED = pq.PGconn.connect_start(b"none")
CLOSED.finish()


class Connections:
    """Gives each attempt a new psycopg object over a session that was reset: no setting,
    row factory or temporary table of one job is there for the next.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        # Since when; the latest goes first.
        self._idle: list[tuple[float, pq.abc.PGconn]] = []

    @contextlib.contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        """Begin a transaction for a `def` handler; it commits unless the handler raises."""
        conn = psycopg.Connection[Any](self._session())
        conn.isolation_level = READ_COMMITTED
        conn.prepare_threshold = None
        with self._kept(conn), conn.transaction():
            yield conn

    @contextlib.asynccontextmanager
    async def async_connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """The same for an `async def` handler."""
        conn = psycopg.AsyncConnection[Any](await asyncio.to_thread(self._session))
        await conn.set_isolation_level(READ_COMMITTED)
        conn.prepare_threshold = None
        with self._kept(conn):
            async with conn.transaction():
                yield conn

    def _session(self) -> pq.abc.PGconn:
        """Find an idle session that lives, and reset it; else connect."""
        with contextlib.suppress(IndexError):
            while pgconn := self._idle.pop()[1]:
                if pgconn.exec_(b"discard all").status == pq.ExecStatus.COMMAND_OK:
                    return pgconn
                pgconn.finish()
        try:
            conn = psycopg.connect(self._dsn)
        except psycopg.Error as error:
            raise Unready(f"no connection for the handler: {error}") from error
        session, conn.pgconn = (
            conn.pgconn,
            CLOSED,
        )  # or it complains of not being closed
        return session

    @contextlib.contextmanager
    def _kept(
        self, conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
    ) -> Iterator[None]:
        try:
            yield
        finally:
            session, conn.pgconn = conn.pgconn, CLOSED  # for a handler that has kept it
            if session.transaction_status == pq.TransactionStatus.IDLE:
                self._idle.append((time.monotonic(), session))
            else:
                session.finish()

    def close_idle(self, after: float = KEEP) -> None:
        """Close what nobody has used for so many seconds."""
        with contextlib.suppress(IndexError):
            while self._idle[0][0] <= time.monotonic() - after:
                self._idle.pop(0)[1].finish()
