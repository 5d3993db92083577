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
RESET = (b"discard all", b"set default_transaction_isolation = 'read committed'")
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

    @contextlib.asynccontextmanager
    async def connection(self, is_async: bool) -> AsyncIterator[Any]:
        """Begin a transaction for a handler; it commits unless the handler raises.

        For a `def` handler it waits in the thread, and not by `await`.
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
        """Find an idle session that lives, and reset it; else connect."""
        with contextlib.suppress(IndexError):
            while session := self._idle.pop()[1]:
                if all(
                    session.exec_(c).status == pq.ExecStatus.COMMAND_OK for c in RESET
                ):
                    return session
                session.finish()
        try:
            conn = psycopg.connect(self._dsn)
        except psycopg.Error as error:
            raise Unready(f"no connection for the handler: {error}") from error
        session, conn.pgconn = (
            conn.pgconn,
            CLOSED,
        )  # or it complains of not being closed
        session.exec_(RESET[-1])
        return session

    @contextlib.contextmanager
    def _kept(
        self, conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
    ) -> Iterator[None]:
        """Keep the session of a connection afterwards, if it is well."""
        conn.prepare_threshold = None
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
