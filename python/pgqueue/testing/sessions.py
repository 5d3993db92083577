"""Lends a test's own session to a handler."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import psycopg

from pgqueue import database
from pgqueue.drivers import either, lent


@contextlib.asynccontextmanager
async def savepoint(
    conn: database.Connection, is_async: bool, turn: Any
) -> AsyncIterator[Any]:
    """Lend the session to a handler, in a savepoint of its own, or to its steps in turn."""
    async with either(turn):
        if not is_async:
            with lent(conn) as loan, loan.transaction():
                yield loan
            return
        view = psycopg.AsyncConnection[Any](conn.pgconn)
        view.prepare_threshold = None
        try:
            async with view.transaction():
                yield view
        finally:
            del view.pgconn
