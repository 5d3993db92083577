"""How to run a query on the connection that a producer has, whatever driver it is of."""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import psycopg
from psycopg.rows import tuple_row

T = TypeVar("T")


class _AsyncSession(Protocol):
    """SQLAlchemy's AsyncSession."""

    def connection(self) -> Coroutine[Any, Any, Any]: ...


class _AsyncEngineConnection(Protocol):
    """SQLAlchemy's AsyncConnection."""

    def exec_driver_sql(
        self, statement: str, parameters: Any = None
    ) -> Coroutine[Any, Any, Any]: ...


class _AsyncpgConnection(Protocol):
    def fetch(self, query: str, *args: Any) -> Coroutine[Any, Any, Any]: ...


AsyncConn = (
    psycopg.AsyncConnection[Any]
    | psycopg.AsyncCursor[Any]
    | _AsyncSession
    | _AsyncEngineConnection
    | _AsyncpgConnection
)


def call(
    conn: Any, query: str, params: tuple[Any, ...], shape: Callable[[list[int]], T]
) -> T | Awaitable[T]:
    """Run a query with %s for its parameters, and shape its only column.

    On an async connection what comes back is to be awaited.
    """
    if isinstance(conn, psycopg.Cursor | psycopg.AsyncCursor):
        conn = conn.connection  # a cursor of our own leaves the caller's rows alone
    if isinstance(conn, psycopg.Connection | psycopg.AsyncConnection):
        cursor: Any = conn.cursor(row_factory=tuple_row)
    elif hasattr(conn, "exec_driver_sql"):
        return _call_engine(conn, query, params, shape)
    elif callable(getattr(conn, "connection", None)):
        return _call_engine(conn.connection(), query, params, shape)  # of a session
    elif hasattr(conn, "fetch") and not hasattr(conn, "fetchall"):
        return _later(conn.fetch(_numbered(query), *params), shape)
    else:
        # Django's cursor has an attribute `cursor`, too.
        cursor = conn.cursor() if callable(getattr(conn, "cursor", None)) else conn
    executed = cursor.execute(query, params)
    if inspect.isawaitable(executed):
        return _fetch(cursor, executed, shape)
    return shape([_first(row) for row in cursor.fetchall()])


def _call_engine(
    conn: Any, query: str, params: tuple[Any, ...], shape: Callable[[list[int]], T]
) -> T | Awaitable[T]:
    """Run a query on a connection of SQLAlchemy, or when an async session has given one."""
    if inspect.iscoroutine(conn):  # an AsyncConnection is awaitable itself
        return _call_session(conn, query, params, shape)
    if "dollar" in conn.dialect.paramstyle:
        query = _numbered(query)
    executed = conn.exec_driver_sql(query, params)
    if inspect.isawaitable(executed):
        return _later(executed, shape)
    return shape([row[0] for row in executed])


async def _call_session(
    given: Awaitable[Any],
    query: str,
    params: tuple[Any, ...],
    shape: Callable[[list[int]], T],
) -> T:
    called = _call_engine(await given, query, params, shape)
    return await called if inspect.isawaitable(called) else called


def _numbered(query: str) -> str:
    """Name the parameters as Postgres does."""
    first, *rest = query.split("%s")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


async def _later(executed: Awaitable[Any], shape: Callable[[list[int]], T]) -> T:
    return shape([row[0] for row in await executed])


async def _fetch(
    cursor: Any, executed: Awaitable[Any], shape: Callable[[list[int]], T]
) -> T:
    await executed
    return shape([_first(row) for row in await cursor.fetchall()])


def _first(row: Any) -> int:
    """Read the only column of a row, also from a dict cursor's."""
    value: int = next(iter(row.values())) if isinstance(row, Mapping) else row[0]
    return value
