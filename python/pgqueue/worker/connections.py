"""Reuses sessions for handlers with transaction=True and, apart from these, for the steps of the others."""

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
from psycopg import pq

from pgqueue import database
from pgqueue.attempt import Attempt
from pgqueue.drivers import call, either, settled
from pgqueue.worker.deadline import (
    NEVER,
    NoAnswer,
    Server,
    Watched,
    WatchedAsync,
    lack_of_files,
)
from pgqueue.worker.seldom import SELDOM, log, unready

HANDLERS = None  # whose sessions are reset
# What an object holds once its session has been given to another.
CLOSED = pq.PGconn.connect_start(b"none")
CLOSED.finish()


def _made(attempt: Attempt) -> Any:
    return WatchedAsync if attempt.task.is_async else Watched


@contextlib.contextmanager
def _finished_if_it_fails(conn: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        conn.pgconn.finish()
        raise


class Connections:
    """Gives each attempt a new connection object over a session that has been reset.

    No setting, row factory or temporary table of one job is left for the next. Behind a pooler,
    the reset might hit a session that others use: there each attempt opens a connection, and
    whatever is set is set for one transaction.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        # Since when each is idle, the latest last. Of our own ones, which are listed by their
        # class, the objects, too, which know what is prepared.
        self._idle: dict[Any, list[tuple[float, pq.abc.PGconn, Any]]]
        self._idle = {HANDLERS: [], Watched: [], WatchedAsync: []}
        self._is_pooled = False

    @contextlib.asynccontextmanager
    async def connection(self, attempt: Attempt) -> AsyncIterator[Any]:
        """Begin a transaction for a handler, which commits unless it raises; for a `def`, nothing is awaited."""
        conn = await self._reset(attempt) or await self._connect(attempt)
        # The deadline is for our own statements, not for the handler's.
        server = self._server
        conn.patience = lambda: NEVER if attempt.in_handler else server.patience()
        try:
            conn.prepare_threshold = None
            await settled(conn.set_autocommit(False))
            await settled(conn.set_isolation_level(database.READ_COMMITTED))
            async with either(conn.transaction()):
                yield conn
        except psycopg.Error as error:
            self._end_useless(attempt, conn, error)
            raise
        finally:
            session, conn.pgconn = conn.pgconn, CLOSED  # the handler may have kept it
            self._keep(HANDLERS, session, self._is_pooled)

    async def ask(self, attempt: Attempt, query: str, *params: Any) -> Any:
        """Return the rows of a statement of ours, from a session that keeps its plans, or another if it is broken."""
        own = _made(attempt)
        while True:
            try:
                (_, _, conn), is_new = self._idle[own].pop(), False
            except IndexError:
                conn, is_new = await self._connect(attempt, is_own=True), True
            try:
                async with either(database.transaction(conn)):
                    return await settled(call(conn, query, params, list))
            except psycopg.Error as error:
                self._end_useless(attempt, conn, error)
                if is_new or not conn.closed:
                    raise
            finally:
                self._keep(own, conn.pgconn, conn.prepare_threshold is None, conn)

    def _keep(
        self, whose: Any, session: pq.abc.PGconn, is_pooled: bool, conn: Any = None
    ) -> None:
        if session.transaction_status == pq.TransactionStatus.IDLE and not is_pooled:
            self._idle[whose].append((time.monotonic(), session, conn))
        else:
            session.finish()

    async def _reset(self, attempt: Attempt) -> Any:
        """Reset an idle session that still works, if there is one, for a new object."""
        with contextlib.suppress(IndexError):
            while True:
                _, session, _ = self._idle[HANDLERS].pop()
                conn = _made(attempt)(session)
                try:
                    with _finished_if_it_fails(conn):
                        conn.patience = self._server.patience
                        await settled(conn.set_autocommit(True))
                        await settled(conn.execute("discard all"))
                    return conn
                except psycopg.Error as error:  # it has broken while it was idle
                    self._end_useless(attempt, conn, error)
        return None

    async def _connect(self, attempt: Attempt, is_own: bool = False) -> Any:
        try:
            with lack_of_files():
                conn = await settled(self._server.connect(make=_made(attempt)))
            with _finished_if_it_fails(conn):
                conn.patience = self._server.patience
                if is_own:
                    await database.set_up(conn)
                else:
                    self._is_pooled = await database.is_pooled(conn)
        except psycopg.Error as error:
            self.close_idle(after=0)  # they may be what is missing
            raise unready("connection", error) from error
        return conn

    def _end_useless(self, attempt: Attempt, conn: Any, error: psycopg.Error) -> None:
        """Keep no session that is read-only, say, since it was made; nor others like one that hangs."""
        if database.is_outage(error):
            conn.pgconn.finish()
        if isinstance(error, NoAnswer):
            said = attempt, error.seconds
            log.warning(
                "%s: no answer in %g s: its connection is given up", *said, extra=SELDOM
            )
            self.close_idle(after=0)

    def close_idle(self, after: float) -> None:
        """Close the sessions that have been idle for this many seconds."""
        for idle in self._idle.values():
            with contextlib.suppress(IndexError):
                while idle[0][0] <= time.monotonic() - after:
                    _, session, _ = idle.pop(0)
                    session.finish()
