"""The four calls that a worker makes, as a worker in any language would."""

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.rows import TupleRow, tuple_row

from pgqueue import database
from pgqueue.attempt import Attempt
from pgqueue.client import to_array

CLAIM = (
    "select id, token, kind, queue, attempt, max_attempts, payload::text, headers::text,"
    " date_part('epoch', lease_expires_at - claimed_at)"
    " from pgqueue.claim_from(%s::text[], %s, %s, %s::float8 * interval '1 s',"
    " %s::text[], %s::int[], %s::int[])"
)
EXTEND = (
    "select status"
    " from pgqueue.extend(%s::bigint[], %s::bigint[], %s::float8 * interval '1 s')"
)
# A moment becomes a delay by the server's clock.
FINISH = (
    "select f.job_id, f.status from pgqueue.finish("
    "%s::bigint[], %s::bigint[], %s::text[], %s::text[], array("
    "select coalesce(d.delay, case when d.until is not null"
    " then greatest(d.until - clock_timestamp(), interval '0') end)"
    " from unnest(%s::interval[], %s::timestamptz[]) with ordinality"
    " as d (delay, until, place) order by d.place)) as f"
)
# Only what is not as hoped comes back.
COMPLETE = (
    "select f.job_id, f.status from pgqueue.finish("
    "%s::bigint[], %s::bigint[], array_fill('complete'::text, array[%s]), %s::text[]"
    ") as f where f.status <> 'completed'"
)
REST = "select extract(epoch from pgqueue.rest(%s::text[], %s::text[], park => %s))::float8"


def claim(
    conn: psycopg.Connection[Any],
    worker: str,
    queues: Sequence[str],
    max_jobs: int,
    lease: float | None = None,
    kinds: Sequence[str] | None = None,
    weights: Sequence[int] | None = None,
    limits: Sequence[int | None] | None = None,
) -> list[Attempt]:
    """Claim by pgqueue.claim_from(); the lease is in seconds."""
    params = (queues, worker, max_jobs, lease, kinds, weights, limits)
    with database.transaction(conn):
        rows = _execute(conn, CLAIM, params).fetchall()
    return [Attempt(*row) for row in rows]


def extend(
    conn: psycopg.Connection[Any], attempts: Sequence[Attempt], lease: float
) -> list[str]:
    """Extend leases by pgqueue.extend(), and return the status of each."""
    with database.transaction(conn):
        rows = _execute(conn, EXTEND, (*_held(attempts), lease)).fetchall()
    return [status for (status,) in rows]


def finish(
    conn: psycopg.Connection[Any], attempts: Sequence[Attempt]
) -> dict[int, str]:
    """End attempts by pgqueue.finish(): the status of each by the id of its job.

    Those that are completed, as they should be, may be missing.
    """
    outcomes = [a.outcome for a in attempts]
    has_text = any(o.text is not None for o in outcomes)
    texts = to_array(o.text for o in outcomes) if has_text else None
    more: list[Any]
    if all(o.name == "complete" for o in outcomes):
        query, more = COMPLETE, [len(attempts), texts]
    else:
        names = to_array(o.name for o in outcomes)
        delays, untils = [o.delay for o in outcomes], [o.until for o in outcomes]
        query, more = FINISH, [names, texts, delays, untils]
    with database.transaction(conn):
        return dict(_execute(conn, query, (*_held(attempts), *more)).fetchall())


def rest(
    conn: psycopg.Connection[Any],
    queues: Sequence[str],
    kinds: Sequence[str] | None,
    park: bool,
) -> float | None:
    """Ask pgqueue.rest() for how many seconds there is nothing to claim; None: unknown."""
    with database.transaction(conn):
        row = _execute(conn, REST, (queues, kinds, park)).fetchone()
    seconds: float | None = row[0] if row else None
    return seconds


def _execute(
    conn: psycopg.Connection[Any], query: str, params: Sequence[Any]
) -> psycopg.Cursor[TupleRow]:
    """Execute it also where a test has other rows."""
    with_tuples = conn.cursor(row_factory=tuple_row)
    return with_tuples.execute(query, params, binary=True)


def _held(attempts: Sequence[Attempt]) -> tuple[str, str]:
    """Write ids and tokens as arrays, many times faster than psycopg adapts lists."""
    ids = "{" + ",".join([str(a.id) for a in attempts]) + "}"
    return ids, "{" + ",".join([str(a.token) for a in attempts]) + "}"
