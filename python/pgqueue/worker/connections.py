"""Connections for handlers with transaction=True, over sessions that are reused."""

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg
from psycopg import pq

from pgqueue import database
from pgqueue.attempt import Attempt
from pgqueue.drivers import either, settled
from pgqueue.worker.deadline import NEVER, NoAnswer, Server, Watched, WatchedAsync
from pgqueue.worker.seldom import SELDOM, log, unready

# What an object holds once its session has been given to another.
CLOSED = pq.PGconn.connect_start(b"none")
CLOSED.finish()


def _made(attempt: Attempt) -> Any:
    return WatchedAsync if attempt.task.is_async else Watched


class Connections:
    """Gives each attempt a new connection object over a session that has been reset.

    No setting, row factory or temporary table of one job is left for the next. Behind a pooler,
    the reset might hit a session that others use: there each attempt opens a connection, and
    whatever is set is set for one transaction.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        # Each with since when it is idle, and whether a handler has had it; the latest is used first.
        self._idle: list[tuple[float, pq.abc.PGconn, bool]] = []
        self._is_pooled = False

    @contextlib.asynccontextmanager
    async def connection(self, attempt: Attempt) -> AsyncIterator[Any]:
        """Begin a transaction for a handler; it commits unless the handler raises.

        For a `def` handler it blocks the thread, and never awaits.
        """
        transaction = contextlib.AsyncExitStack()
        conn = await self._reset(attempt, transaction)
        conn = conn or await self._connect(attempt, transaction)
        try:
            async with transaction:
                yield conn
        except NoAnswer as error:
            self._give_up(attempt, error)
            raise
        finally:
            session, conn.pgconn = conn.pgconn, CLOSED  # the handler may have kept it
            is_idle = session.transaction_status == pq.TransactionStatus.IDLE
            if is_idle and not self._is_pooled:
                # One that was used only by our own statements, for steps, is unchanged and
                # keeps its plans: without them, a step would cost ten times as much.
                is_used = attempt.connection is not None
                self._idle.append((time.monotonic(), session, is_used))
            else:
                session.finish()

    async def _reset(self, attempt: Attempt, transaction: Any) -> Any:
        """Begin in an idle session that still works, if there is one, through a new object."""
        with contextlib.suppress(IndexError):
            while True:
                _, session, is_used = self._idle.pop()
                conn = _made(attempt)(session)
                try:
                    if is_used:
                        await self._execute(conn, "discard all")
                    return await self._begin(conn, attempt, transaction)
                except NoAnswer as error:
                    self._give_up(attempt, error)
                except psycopg.Error:  # it has broken while it was idle
                    continue
        return None

    async def _connect(self, attempt: Attempt, transaction: Any) -> Any:
        try:
            conn = await settled(self._server.connect(make=_made(attempt)))
            cursor = await self._execute(conn, database.BACKEND)
            (backend,) = await settled(cursor.fetchone())
            self._is_pooled = backend != conn.info.backend_pid
            return await self._begin(conn, attempt, transaction)
        except psycopg.Error as error:
            raise unready("connection", error) from error

    async def _begin(self, conn: Any, attempt: Attempt, transaction: Any) -> Any:
        """Begin a transaction, which ends with that stack."""
        # The deadline is for our own statements, not for the handler's.
        server = self._server
        conn.patience = lambda: NEVER if attempt.in_handler else server.patience()
        conn.prepare_threshold = None
        try:
            await settled(conn.set_autocommit(False))
            await settled(conn.set_isolation_level(database.READ_COMMITTED))
            await transaction.enter_async_context(either(conn.transaction()))
            return conn
        except BaseException:
            conn.pgconn.finish()
            raise

    async def _execute(self, conn: Any, statement: str) -> Any:
        """Run a statement of ours outside a transaction; close what fails."""
        conn.patience = self._server.patience
        try:
            await settled(conn.set_autocommit(True))
            return await settled(conn.execute(statement))
        except BaseException:
            conn.pgconn.finish()
            raise

    def _give_up(self, attempt: Attempt, error: NoAnswer) -> None:
        said = attempt, error.seconds
        log.warning(
            "%s: no answer in %g s: its connection is given up", *said, extra=SELDOM
        )
        self.close_idle(after=0)  # they will be no better

    def close_idle(self, after: float) -> None:
        """Close the sessions that have been idle for this many seconds."""
        with contextlib.suppress(IndexError):
            while self._idle[0][0] <= time.monotonic() - after:
                self._idle.pop(0)[1].finish()
