"""The producer's side: enqueue on a connection, and in a transaction, that is yours."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict, Unpack

import psycopg

from pgqueue.drivers import INTERVAL, as_interval, call, on_any_connection
from pgqueue.payload import to_json

OnDuplicate = Literal["skip", "replace", "postpone", "error"]


# The code registers a class with psycopg, which then raises it for that SQLSTATE.
class JobNotFound(psycopg.DatabaseError, code="PQ001", name="JOB_NOT_FOUND"):
    """The job, or dead job, does not exist (SQLSTATE PQ001)."""


class LeaseLost(psycopg.DatabaseError, code="PQ002", name="LEASE_LOST"):
    """The job may be running elsewhere: discard the result (SQLSTATE PQ002)."""


class _CommonOptions(TypedDict, total=False):
    """What all take; None, or omitted, means the queue's default."""

    kind: str | None
    priority: int | None  # a larger one runs first
    max_attempts: int | None
    headers: Mapping[str, Any] | None


class BatchOptions(_CommonOptions, total=False):
    """The options of `create_batch`, for its callback."""

    group_key: str | None


class _Options(_CommonOptions, total=False):
    """What both `enqueue` and `enqueue_many` take."""

    run_at: datetime | timedelta | None  # with a time zone; a timedelta is from now
    on_duplicate: OnDuplicate | None
    expires_at: datetime | timedelta | None  # like run_at; no attempt starts later
    batch_id: int | None  # what create_batch returned


class Options(_Options, total=False):
    """The options of `enqueue`."""

    unique_key: str | None
    unique_for: timedelta | None  # at most one job with the key, ended or not
    group_key: str | None
    after: Sequence[int] | None  # the ids of jobs that have to complete first
    if_dead: Literal["cancel", "run"] | None  # if one of them dies or is cancelled


class ManyOptions(_Options, total=False):
    """The options of `enqueue_many`: a key for each payload, or None."""

    unique_keys: Sequence[str | None] | None
    group_keys: Sequence[str | None] | None


# Cast from text, which every driver can send. psycopg 2 writes numbers as they are: without
# the brackets, a minus sign in front of a cast would be an operator.
JSON = "%s::pg_catalog.text::pg_catalog.jsonb"
# Not the word NULL, which a session with array_nulls = off would take for a text.
TEXTS = "pg_catalog.array_replace(%s::pg_catalog.text::pg_catalog.text[], '', null)"
CASTS = {
    "priority": "(%s)::int",
    "max_attempts": "(%s)::int",
    "headers": JSON,
    "batch_id": "(%s)::bigint",
    "after": "%s::pg_catalog.text::bigint[]",
    "unique_keys": TEXTS,
    "group_keys": TEXTS,
}
NAMES = ("kind", "unique_key", "group_key")
MOMENTS = ("run_at", "expires_at")
DELAY = f"pg_catalog.now() operator(pg_catalog.+) {INTERVAL}"


@on_any_connection
def enqueue(
    conn: Any, queue: str, payload: Any = None, **options: Unpack[Options]
) -> int:
    """Add a job in the caller's transaction and return its id: pgqueue.enqueue().

    Workers see the job when the caller commits; nothing here commits. `conn` is a
    connection or cursor of psycopg 3, psycopg 2 or Django, a connection or session of
    SQLAlchemy 2, or a connection of asyncpg; if it is async, await the result. `payload`
    is anything that JSON can hold, or a dataclass; with pydantic also models,
    datetime, UUID, Decimal and Enum. With OpenTelemetry installed, the headers get the
    trace context of the current span, unless they have a `traceparent`.

    Raises TypeError or ValueError for what JSON cannot hold, ValueError for a moment without a
    time zone, TypeError for an unknown option, and the driver's own error for what the SQL
    function refuses: 22023 (bad argument), 22P05 (a NUL character), 54000 (payload too large),
    23505 (duplicate, with on_duplicate="error").
    """
    given = queue, to_json(payload, "payload")
    start = f"select pgqueue.enqueue(%s, {JSON}"
    return call(conn, *_statement(start, given, options, Options), _id)


@on_any_connection
def enqueue_many(
    conn: Any, queue: str, payloads: Sequence[Any], **options: Unpack[ManyOptions]
) -> list[int]:
    """Add a job for each payload, all or none, and return their ids in the same order.

    Calls pgqueue.enqueue_many(). `unique_keys` and `group_keys`, if given, are as long as
    `payloads`. Raises TypeError for a key that is not a str, or payloads that are one,
    ValueError for an empty key; all else is as in `enqueue`.
    """
    if isinstance(payloads, (str, bytes, Mapping)):
        raise TypeError(f"payloads must be a list, not {type(payloads).__name__}")
    named = ((p, f"payloads[{i}]") for i, p in enumerate(payloads))
    texts = to_array(to_json(p, name) or "{}" for p, name in named)
    start = f"select * from pgqueue.enqueue_many(%s, {JSON}[]"
    statement = _statement(start, (queue, texts), options, ManyOptions)
    return call(conn, *statement, lambda rows: [value for (value,) in rows])


@on_any_connection
def create_batch(
    conn: Any, queue: str, payload: Any = None, **options: Unpack[BatchOptions]
) -> int:
    """Create a batch by pgqueue.create_batch(), and return its id, for `batch_id`.

    Its callback is enqueued into this queue, once, after close_batch, when all its
    jobs have ended. `payload` is a JSON object, to which their counts are added.
    """
    given = queue, to_json(payload, "payload")
    start = f"select pgqueue.create_batch(%s, {JSON}"
    return call(conn, *_statement(start, given, options, BatchOptions), _id)


@on_any_connection
def close_batch(conn: Any, batch_id: int) -> None:
    """Declare by pgqueue.close_batch() that all jobs of a batch have been enqueued.

    Its jobs may add others while they run. Raises JobNotFound if it does not exist.
    """
    query = "select pgqueue.close_batch((%s)::bigint)"
    return call(conn, query, (batch_id,), lambda _: None)


@on_any_connection
def emit(conn: Any, event: str, payload: Any = None) -> bool:
    """Record in the caller's transaction that an event has happened: pgqueue.emit().

    Returns whether this was the first call for the event; later ones change nothing. Jobs
    that wait for it go on when this commits. `conn` and `payload` are as for `enqueue`.
    """
    given = event, to_json(payload, "payload")
    query = f"select pgqueue.emit(%s, {JSON})"
    return call(conn, query, given, lambda rows: bool(rows[0][0]))


def _id(rows: list[tuple[Any, ...]]) -> int:
    return int(rows[0][0])


def _statement(
    start: str, given: tuple[Any, ...], options: Mapping[str, Any], known: Any
) -> tuple[str, tuple[Any, ...]]:
    """Name only the options that were given: Postgres then has less to parse."""
    query, params = start, list(given)
    if sys.modules.get("opentelemetry.trace"):  # or there is no span
        from pgqueue import tracing

        headers = tracing.with_context(options.get("headers"))
        options = {**options, "headers": headers}
    for name, value in options.items():
        if name not in known.__annotations__:
            raise TypeError(f"unknown option {name!r}")
        if value is not None:
            cast, value = _read(name, value)
            query += f", {name} => {cast}"
            params.append(value)
    return query + ")", tuple(params)


def _read(name: str, value: Any) -> tuple[str, Any]:
    """Return how an option is written in the query, and what is sent for it."""
    if name in MOMENTS:
        if isinstance(value, timedelta):
            return DELAY, as_interval(value)
        if isinstance(value, int | float):
            raise TypeError(f"{name} must be a datetime or a timedelta, not {value!r}")
        if isinstance(value, datetime) and value.tzinfo is None:
            raise ValueError(f"{name} must have a time zone")
    elif name in NAMES:
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, not {value!r}")
    elif name == "unique_for":
        if isinstance(value, int | float):
            raise TypeError(f"unique_for must be a timedelta, not {value!r}")
        if isinstance(value, timedelta):
            return INTERVAL, as_interval(value)
    elif name == "headers":
        value = to_json(value, name)
    elif name == "after":
        if isinstance(value, int | str):
            raise TypeError("after takes the ids of jobs; for a delay there is run_at")
        value = to_array(str(int(id)) for id in value)
    elif name.endswith("_keys"):
        if isinstance(value, str):
            raise TypeError(f"{name} takes a key for each payload, not {value!r}")
        keys = list(value)
        if "" in keys:
            raise ValueError(f"a key is None or not empty: {name}")
        value = to_array(keys)
    return CASTS.get(name, "%s"), value


def to_array(texts: Iterable[str | None]) -> str:
    """Write an array as Postgres reads it, for any driver; None as an empty text, see TEXTS.

    psycopg takes twenty times as long to adapt a list.
    """
    return "{" + ",".join('""' if t is None else _quoted(t) for t in texts) + "}"


def _quoted(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"a key must be a str or None, not {type(text).__name__}")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
