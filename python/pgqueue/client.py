"""The producer's side: enqueue on a connection, and in a transaction, that is yours."""

import dataclasses
import inspect
import json
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from datetime import datetime
from typing import Any, Literal, TypeVar, overload

import psycopg
from psycopg.rows import tuple_row

OnDuplicate = Literal["skip", "replace", "postpone", "error"]
AsyncConn = psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any]
T = TypeVar("T")


# The code registers a class with psycopg, which then raises it for that SQLSTATE.
class JobNotFound(psycopg.DatabaseError, code="PQ001", name="JOB_NOT_FOUND"):
    """There is no such job, or dead job (SQLSTATE PQ001)."""


class LeaseLost(psycopg.DatabaseError, code="PQ002", name="LEASE_LOST"):
    """The job may be running elsewhere: discard the result (SQLSTATE PQ002)."""


@overload
def enqueue(
    conn: AsyncConn,
    queue: str,
    payload: Any = None,
    *,
    kind: str | None = None,
    priority: int | None = None,
    run_at: datetime | None = None,
    max_attempts: int | None = None,
    unique_key: str | None = None,
    on_duplicate: OnDuplicate | None = None,
    group_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
) -> Coroutine[Any, Any, int]: ...
@overload
def enqueue(
    conn: Any,
    queue: str,
    payload: Any = None,
    *,
    kind: str | None = None,
    priority: int | None = None,
    run_at: datetime | None = None,
    max_attempts: int | None = None,
    unique_key: str | None = None,
    on_duplicate: OnDuplicate | None = None,
    group_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
) -> int: ...
def enqueue(
    conn: Any,
    queue: str,
    payload: Any = None,
    *,
    kind: str | None = None,
    priority: int | None = None,
    run_at: datetime | None = None,
    max_attempts: int | None = None,
    unique_key: str | None = None,
    on_duplicate: OnDuplicate | None = None,
    group_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
) -> Any:
    """Add a job in the caller's transaction and return its id: pgqueue.enqueue().

    Workers see the job when the caller commits; nothing here commits. `conn` is a
    connection or cursor of psycopg 3 (of an async one, await the result), psycopg 2 or
    Django, or a connection or session of SQLAlchemy 2. `payload` is anything that JSON
    can hold, a dataclass or a pydantic model; a larger `priority` runs first; `run_at`
    should have a time zone. Options left as None take the defaults of the queue.

    Raises ValueError, naming the path, for a payload or headers that Postgres cannot
    store, and the driver's error for what the SQL function refuses: 22023 (bad
    argument), 54000 (payload too large), 23505 (duplicate with on_duplicate="error").
    """
    query, params = _statement(
        "pgqueue.enqueue(%s, %s::jsonb",
        {
            "kind": kind,
            "priority": priority,
            "run_at": run_at,
            "max_attempts": max_attempts,
            "unique_key": unique_key,
            "on_duplicate": on_duplicate,
            "group_key": group_key,
            "headers": to_json(headers, "headers"),
        },
    )
    params = (queue, to_json(payload, "payload"), *params)
    return _call(conn, f"select {query}", params, lambda ids: ids[0])


@overload
def enqueue_many(
    conn: AsyncConn,
    queue: str,
    payloads: Sequence[Any],
    *,
    kind: str | None = None,
    priority: int | None = None,
    run_at: datetime | None = None,
    max_attempts: int | None = None,
    unique_keys: Sequence[str | None] | None = None,
    on_duplicate: OnDuplicate | None = None,
    group_keys: Sequence[str | None] | None = None,
    headers: Mapping[str, Any] | None = None,
) -> Coroutine[Any, Any, list[int]]: ...
@overload
def enqueue_many(
    conn: Any,
    queue: str,
    payloads: Sequence[Any],
    *,
    kind: str | None = None,
    priority: int | None = None,
    run_at: datetime | None = None,
    max_attempts: int | None = None,
    unique_keys: Sequence[str | None] | None = None,
    on_duplicate: OnDuplicate | None = None,
    group_keys: Sequence[str | None] | None = None,
    headers: Mapping[str, Any] | None = None,
) -> list[int]: ...
def enqueue_many(
    conn: Any,
    queue: str,
    payloads: Sequence[Any],
    *,
    kind: str | None = None,
    priority: int | None = None,
    run_at: datetime | None = None,
    max_attempts: int | None = None,
    unique_keys: Sequence[str | None] | None = None,
    on_duplicate: OnDuplicate | None = None,
    group_keys: Sequence[str | None] | None = None,
    headers: Mapping[str, Any] | None = None,
) -> Any:
    """Add a job for each payload, all or none, and return their ids in the same order.

    Calls pgqueue.enqueue_many(). `unique_keys` and `group_keys`, where given, are as
    long as `payloads`, with None for a job without one; raises TypeError for a key that
    is no str. All else is as in `enqueue`.
    """
    query, params = _statement(
        "pgqueue.enqueue_many(%s, %s::jsonb[]",
        {
            "kind": kind,
            "priority": priority,
            "run_at": run_at,
            "max_attempts": max_attempts,
            "unique_keys": None if unique_keys is None else to_array(unique_keys),
            "on_duplicate": on_duplicate,
            "group_keys": None if group_keys is None else to_array(group_keys),
            "headers": to_json(headers, "headers"),
        },
    )
    texts = to_array(to_json(p, f"payloads[{i}]") for i, p in enumerate(payloads))
    return _call(
        conn, f"select * from {query}", (queue, texts, *params), lambda ids: ids
    )


CASTS = {"headers": "::jsonb", "unique_keys": "::text[]", "group_keys": "::text[]"}


def _statement(start: str, options: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """Name only the options that were given: there is less to send, and to read."""
    given = {name: value for name, value in options.items() if value is not None}
    named = [f", {name} => %s{CASTS.get(name, '')}" for name in given]
    return start + "".join(named) + ")", tuple(given.values())


def to_json(value: Any, name: str) -> str | None:
    """Encode a value as JSON that Postgres can store; None stays None.

    Raises ValueError, or TypeError for a type that JSON does not have, with the path to
    what is wrong.
    """
    if value is None:
        return None
    try:
        text = _encode(value)
    except (ValueError, TypeError, RecursionError) as error:
        path = _find_unstorable(value, name) or f"{name}: {error}"
        raise type(error)(f"cannot be stored as JSON: {path}") from None
    # Only a text with such an escape is worth the walk.
    if "\\u0000" in text or "\\ud" in text:
        if found := _find_unstorable(value, name):
            raise ValueError(f"cannot be stored as JSON: {found}")
    return text


def _as_plain(value: Any) -> Any:
    """Turn a dataclass or a pydantic model into what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if callable(dump := getattr(value, "model_dump", None)):
        return dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not a type of JSON")


_encode = json.JSONEncoder(allow_nan=False, default=_as_plain).encode


def _find_unstorable(value: Any, name: str) -> str | None:
    """Name the path to the first thing that Postgres cannot store, and what it is."""
    # No recursion, and every container once: deep and circular values come here too.
    todo, seen = [(name, value)], set[int]()
    while todo:
        path, item = todo.pop()
        if isinstance(item, str):
            if "\0" in item:
                return f"{path}: a NUL character"
            if any("\ud800" <= char <= "\udfff" for char in item):
                return f"{path}: half of a surrogate pair"
        elif isinstance(item, float):
            if item != item or item in (float("inf"), float("-inf")):
                return f"{path}: {item}"
        elif isinstance(item, dict | list | tuple):
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, dict):
                for key in item:
                    if not isinstance(key, str | int | float | bool | None):
                        return f"{path}: a key of type {type(key).__name__}"
                todo += [(f"{path}, a key", key) for key in item]
                todo += [(f"{path}[{key!r}]", inner) for key, inner in item.items()]
            else:
                todo += [(f"{path}[{i}]", inner) for i, inner in enumerate(item)]
        elif item is not None and not isinstance(item, int):
            try:
                todo.append((path, _as_plain(item)))
            except TypeError as error:
                return f"{path}: {error}"
    return None


def to_array(texts: Iterable[str | None]) -> str:
    """Write an array as Postgres reads it: the same for all drivers.

    It takes a twentieth of the time in which psycopg adapts a list.
    """
    return "{" + ",".join("NULL" if t is None else _quoted(t) for t in texts) + "}"


def _quoted(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"a key is a str or None, not {type(text).__name__}")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _call(
    conn: Any, query: str, params: tuple[Any, ...], shape: Callable[[list[int]], T]
) -> T | Awaitable[T]:
    """Run a query on whatever connection this is, and shape its only column."""
    if isinstance(conn, psycopg.Cursor | psycopg.AsyncCursor):
        conn = conn.connection  # a cursor of our own leaves the caller's rows alone
    if callable(getattr(conn, "connection", None)):
        conn = conn.connection()  # of a SQLAlchemy session
    if hasattr(conn, "exec_driver_sql"):
        return shape([row[0] for row in conn.exec_driver_sql(query, params)])

    if isinstance(conn, psycopg.Connection | psycopg.AsyncConnection):
        cursor: Any = conn.cursor(row_factory=tuple_row)
    else:
        # Django's cursor has an attribute `cursor`, too.
        cursor = conn.cursor() if callable(getattr(conn, "cursor", None)) else conn
    executed = cursor.execute(query, params)
    if inspect.isawaitable(executed):
        return _finish(cursor, executed, shape)
    return shape([_first(row) for row in cursor.fetchall()])


async def _finish(
    cursor: Any, executed: Awaitable[Any], shape: Callable[[list[int]], T]
) -> T:
    await executed
    return shape([_first(row) for row in await cursor.fetchall()])


def _first(row: Any) -> int:
    """Read the only column of a row, also from a dict cursor's."""
    value: int = next(iter(row.values())) if isinstance(row, Mapping) else row[0]
    return value
