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


class Connections:
    """Gives each attempt a new connection object over a session that has been reset.

    No setting, row factory or temporary table of one job is left for the next. Behind a pooler,
    the reset might hit a session that others use: there each attempt opens a connection, and
    whatever is set is set for one transaction.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        # Each with since when it is idle, and what resets it; the latest is used first.
        self._idle: list[tuple[float, pq.abc.PGconn, str]] = []
        self._is_pooled = False

    @contextlib.asynccontextmanager
    async def connection(self, attempt: Attempt) -> AsyncIterator[Any]:
        """Begin a transaction for a handler; it commits unless the handler raises.

        For a `def` handler it blocks the thread, and never awaits.
        """
        make: Any = WatchedAsync if attempt.task.is_async else Watched
        conn = await self._reset(make, attempt) or await self._connect(make)
        # The deadline is for our own statements, not for the handler's.
        server = self._server
        conn.patience = lambda: NEVER if attempt.in_handler else server.patience()
        try:
            conn.prepare_threshold = None
            await settled(conn.set_autocommit(False))
            await settled(conn.set_isolation_level(database.READ_COMMITTED))
            async with either(conn.transaction()):
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
                reset = "select" if attempt.connection is None else "discard all"
                self._idle.append((time.monotonic(), session, reset))
            else:
                session.finish()

    async def _reset(self, make: Any, attempt: Attempt) -> Any:
        """Reset an idle session that still works, if there is one, for a new object."""
        with contextlib.suppress(IndexError):
            while True:
                _, session, reset = self._idle.pop()
                conn = make(session)
                try:
                    await self._execute(conn, reset)
                    return conn
                except NoAnswer as error:
                    self._give_up(attempt, error)
                except psycopg.Error:  # it has broken while it was idle
                    continue
        return None

    async def _connect(self, make: Any) -> Any:
        try:
            conn = await settled(self._server.connect(make=make))
            cursor = await self._execute(conn, database.BACKEND)
            (backend,) = await settled(cursor.fetchone())
            self._is_pooled = backend != conn.info.backend_pid
        except psycopg.Error as error:
            raise unready("connection", error) from error
        return conn

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
