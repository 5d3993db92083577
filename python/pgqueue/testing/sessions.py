"""Lends a test's own session to code that expects a worker's connection."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from pgqueue import database
from pgqueue.drivers import either, of_psycopg


def is_in_transaction(conn: database.Connection) -> bool:
    return conn.info.transaction_status != TransactionStatus.IDLE


@contextlib.contextmanager
def lent(conn: Any) -> Iterator[database.Connection]:
    """Lend the session of a connection, without the row factory and types of its owner."""
    owner = of_psycopg(conn)
    session = owner.pgconn
    handlers = session.notice_handler, session.notify_handler
    view = psycopg.Connection[tuple[Any, ...]](session)
    view.prepare_threshold = None
    try:
        if not is_in_transaction(view):
            view.autocommit = owner.autocommit
        yield view
    finally:
        del view.pgconn  # it would warn that nobody closed it
        session.notice_handler, session.notify_handler = handlers


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
