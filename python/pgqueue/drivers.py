"""Runs a query on the producer's connection, whichever driver it is from."""

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

Rows = list[tuple[Any, ...]]
INTERVAL = "%s::pg_catalog.text::interval"  # of what as_interval returns
T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class _Async(Protocol):
    """An async connection, cursor or session of psycopg or SQLAlchemy."""

    def __aenter__(self) -> Coroutine[Any, Any, Any]: ...


class _AsyncpgConnection(Protocol):
    def fetch(self, query: str, *args: Any) -> Coroutine[Any, Any, Any]: ...


AsyncConn = _Async | _AsyncpgConnection


class OnAnyConnection(Protocol[P, R]):
    """What `on_any_connection` makes of a function."""

    @overload
    def __call__(
        self, conn: AsyncConn, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def __call__(self, conn: Any, *args: P.args, **kwargs: P.kwargs) -> R: ...


def on_any_connection(
    function: Callable[Concatenate[Any, P], R],
) -> OnAnyConnection[P, R]:
    """Say that what it returns has to be awaited if its connection is async."""
    return cast("OnAnyConnection[P, R]", function)


def call(conn: Any, query: str, params: Any, shape: Callable[[Rows], T]) -> T:
    """Run a query with %s for its parameters; return what `shape` makes of its rows, or an awaitable of it."""
    fetched = _fetch(conn, query, params)
    done: T = _then(fetched, lambda rows: shape([_values(row) for row in rows]))
    return done


def run_without_loop(running: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits nothing to completion."""
    try:
        running.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise RuntimeError("it waits for an event loop")


def as_interval(value: timedelta) -> str:
    """Write it in units of the clock, in any IntervalStyle: to Postgres a day may have 23 hours."""
    return f"{value.days * 86400 + value.seconds} s {value.microseconds} us"


async def settled(value: Any) -> Any:
    """Await what an async connection returns; a sync one returns the value itself."""
    return await value if inspect.isawaitable(value) else value


@asynccontextmanager
async def either(manager: Any) -> AsyncIterator[Any]:
    """Enter a context manager, async or not; if it is not, nothing is awaited."""
    if hasattr(manager, "__aenter__"):
        async with manager as value:
            yield value
    else:
        with manager as value:
            yield value


def _fetch(conn: Any, query: str, params: tuple[Any, ...]) -> Any:
    """Return the rows of a query, or an awaitable of them."""
    if isinstance(conn, psycopg.Cursor | psycopg.AsyncCursor):
        conn = conn.connection  # a cursor of our own leaves the caller's rows alone
    if isinstance(conn, psycopg.Connection | psycopg.AsyncConnection):
        cursor: Any = conn.cursor(row_factory=tuple_row)
        query = spelled_for(cursor, query)
    elif hasattr(conn, "exec_driver_sql"):
        is_numbered = "dollar" in conn.dialect.paramstyle
        return conn.exec_driver_sql(_numbered(query) if is_numbered else query, params)
    elif callable(getattr(conn, "connection", None)):  # a session
        return _then(conn.connection(), lambda conn: _fetch(conn, query, params))
    elif hasattr(conn, "fetch") and not hasattr(conn, "fetchall"):
        return conn.fetch(_numbered(query), *params)
    else:
        # Django's cursor has an attribute `cursor`, too.
        cursor = conn.cursor() if callable(getattr(conn, "cursor", None)) else conn
    if not hasattr(cursor, "execute"):
        raise TypeError(f"neither a connection nor a cursor nor a session: {cursor!r}")
    return _then(cursor.execute(query, params), lambda _: cursor.fetchall())


def of_psycopg(conn: Any) -> psycopg.Connection[Any] | psycopg.AsyncConnection[Any]:
    """Find the psycopg connection below that of Django or SQLAlchemy."""
    if hasattr(conn, "ensure_connection"):
        conn.ensure_connection()
        conn = conn.connection
    elif not isinstance(conn, psycopg.Connection | psycopg.AsyncConnection):
        conn = getattr(conn, "sync_session", getattr(conn, "sync_connection", conn))
        if callable(getattr(conn, "connection", None)):
            conn = conn.connection()
        conn = getattr(getattr(conn, "connection", conn), "driver_connection", conn)
    if not isinstance(conn, psycopg.Connection | psycopg.AsyncConnection):
        kind = f"{type(conn).__module__}.{type(conn).__name__}"
        raise TypeError(f"not a connection on psycopg 3: {kind}")
    return conn


def is_in_transaction(conn: psycopg.Connection[Any]) -> bool:
    return conn.info.transaction_status != TransactionStatus.IDLE


@contextmanager
def lent(
    conn: Any, make: Any = psycopg.Connection
) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """Lend the session of a connection to one of class `make`, without the row factory and types of its owner."""
    owner = of_psycopg(conn)
    session = owner.pgconn
    handlers = session.notice_handler, session.notify_handler
    view = make(session)
    view.prepare_threshold = None
    try:
        if isinstance(view, psycopg.Connection) and not is_in_transaction(view):
            view.autocommit = owner.autocommit
        yield view
    finally:
        del view.pgconn  # it would warn that nobody closed it
        session.notice_handler, session.notify_handler = handlers


def _then(value: Any, function: Callable[[Any], Any]) -> Any:
    """Call a function with a value: now, or when the value has been awaited."""
    if not inspect.isawaitable(value):
        return function(value)

    async def later() -> Any:
        return await settled(function(await value))

    return later()


def spelled_for(cursor: Any, query: str) -> str:
    """Name the parameters as this cursor of psycopg reads them."""
    is_raw = isinstance(cursor, psycopg.RawCursor | psycopg.AsyncRawCursor)
    return _numbered(query) if is_raw else query


def _numbered(query: str) -> str:
    """Name the parameters as Postgres does."""
    first, *rest = query.split("%s")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


def _values(row: Any) -> tuple[Any, ...]:
    """Read a row, also a dict cursor's."""
    return tuple(row.values()) if isinstance(row, Mapping) else tuple(row)
