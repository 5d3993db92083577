"""The SQL functions that a worker calls, as a worker in any language would."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import psycopg

from pgqueue import database
from pgqueue.attempt import Attempt
from pgqueue.client import TEXTS, to_array
from pgqueue.database import Connection
from pgqueue.drivers import as_interval
from pgqueue.worker.seldom import log

T = TypeVar("T")

# Of payloads and headers it sends so many bytes, and one more job; after that, empty texts.
CLAIM = (
    "select id, token, kind, queue, attempt, max_attempts, payload,"
    " case when payload operator(pg_catalog.<>) '' then headers end, seconds, batch_id"
    " from (select id, token, kind, queue, attempt, max_attempts, case when coalesce("
    "pg_catalog.sum(pg_catalog.octet_length(payload)"
    " operator(pg_catalog.+) coalesce(pg_catalog.octet_length(headers), 0)) over ("
    "rows between unbounded preceding and 1 preceding), 0)"
    " operator(pg_catalog.<) %s::bigint then payload else '' end as payload,"
    " headers, seconds, batch_id"
    " from (select id, token, kind, queue, attempt, max_attempts,"
    " payload::pg_catalog.text as payload, headers::pg_catalog.text as headers,"
    " extract(epoch from lease_expires_at operator(pg_catalog.-) claimed_at)::float"
    " as seconds, (terms).batch_id as batch_id"
    " from pgqueue.claim(%s, %s, %s, pg_catalog.make_interval(secs => %s::float),"
    " %s::pg_catalog.text[]) offset 0) as c) as s"
)
CLAIM_FROM = CLAIM.replace(".claim(%s", ".claim_from(%s::pg_catalog.text[]").replace(
    ") offset", f", %s::int[], {TEXTS}::int[]) offset"
)
MOST_BYTES = 16_000_000  # of the payloads and headers that a worker claims at once
EXTEND = (
    "select status from pgqueue.extend("
    "%s::bigint[], %s::bigint[], pg_catalog.make_interval(secs => %s::float))"
)
PROGRESS = (
    "select pg_catalog.count(pgqueue.progress(p.id, p.token, p.done, p.total, p.message))"
    " from rows from (pg_catalog.unnest(%s::bigint[]), pg_catalog.unnest(%s::bigint[]),"
    f" pg_catalog.unnest(%s::numeric[]), pg_catalog.unnest({TEXTS}::numeric[]),"
    f" pg_catalog.unnest({TEXTS})) as p (id, token, done, total, message)"
)
# A moment becomes a delay by the server's clock, not by this machine's.
FINISH = (
    "select f.job_id, f.status from pgqueue.finish("
    f"%s::bigint[], %s::bigint[], %s::pg_catalog.text[], {TEXTS}, array("
    "select coalesce(d.delay, case when d.until is not null then greatest("
    "d.until operator(pg_catalog.-) pg_catalog.clock_timestamp(), interval '0') end)"
    f" from rows from (pg_catalog.unnest({TEXTS}::interval[]),"
    f" pg_catalog.unnest({TEXTS}::timestamp with time zone[])) with ordinality"
    " as d (delay, until, place) order by d.place)) as f"
)
# Only the exceptions come back.
COMPLETE = (
    "select f.job_id, f.status from pgqueue.finish("
    "%s::bigint[], %s::bigint[],"
    " pg_catalog.array_fill('complete'::pg_catalog.text, array[%s::int]),"
    f" {TEXTS}) as f where f.status operator(pg_catalog.<>) 'completed'"
)
REST = (
    "select extract(epoch from pgqueue.rest("
    "%s::pg_catalog.text[], %s::pg_catalog.text[], park => %s))::float"
)

AFTER_FAILOVER = "select pgqueue.after_failover()"


def claim(
    conn: Connection,
    worker: str,
    queues: Sequence[str],
    max_jobs: int,
    lease: float | None = None,
    kinds: Sequence[str] | None = None,
    weights: Sequence[int] | None = None,
    limits: Sequence[int | None] | None = None,
    again: bool = False,
) -> list[Attempt]:
    """Claim by pgqueue.claim_from(); the lease is in seconds.

    From a single queue it calls claim(), which is a quarter of a millisecond faster; `max_jobs`
    must then be within its limit. Jobs without a payload are too much at once, and have to be
    released. `again` is what after_failover() has returned.
    """
    query, how = CLAIM, (worker, max_jobs, lease, kinds and to_array(kinds))
    params: tuple[Any, ...] = (MOST_BYTES, queues[0], *how)
    if len(queues) > 1:
        most = limits and to_array(None if m is None else str(m) for m in limits)
        query = CLAIM_FROM
        params = (MOST_BYTES, to_array(queues), *how, weights, most)
    return [Attempt(*row) for row in _call(conn, query, params, again)]


def extend(conn: Connection, attempts: Sequence[Attempt], lease: float) -> list[str]:
    """Extend leases by pgqueue.extend(), and return the status of each."""
    rows = _call(conn, EXTEND, (*_held(attempts), lease))
    return [status for (status,) in rows]


def progress(conn: Connection, attempts: Sequence[Attempt]) -> None:
    """Report by pgqueue.progress() what the handlers last reported."""
    columns = zip(*(a.progress for a in attempts if a.progress), strict=True)
    _call(conn, PROGRESS, (*_held(attempts), *map(to_array, columns)))


def finish(conn: Connection, attempts: Sequence[Attempt]) -> dict[int, str]:
    """End attempts by pgqueue.finish(), and return statuses by job; those of jobs that completed may be missing."""
    outcomes = [a.outcome for a in attempts]
    has_text = any(o.text is not None for o in outcomes)
    texts = to_array(o.text for o in outcomes) if has_text else None
    if all(o.name == "complete" for o in outcomes):
        completed = (*_held(attempts), len(attempts), texts)
        return dict(_call(conn, COMPLETE, completed))
    names = to_array(o.name for o in outcomes)
    delays = to_array(
        None if o.delay is None else as_interval(o.delay) for o in outcomes
    )
    untils = to_array(None if o.until is None else str(o.until) for o in outcomes)
    return dict(_call(conn, FINISH, (*_held(attempts), names, texts, delays, untils)))


def rest(
    conn: Connection, queues: Sequence[str], kinds: Sequence[str] | None, park: bool
) -> float | None:
    """Ask pgqueue.rest() for how many seconds nothing is due; None: until notified."""
    of_kinds = kinds and to_array(kinds)
    seconds: float | None
    ((seconds,),) = _call(conn, REST, (to_array(queues), of_kinds, park))
    return seconds


def after_failover(conn: Connection) -> bool:
    """Skip tokens that a lost primary may have handed out, before this connection claims.

    Returns whether to do so again before each claim: a pooler may have gone to another server.
    """
    try:
        ((has_skipped,),) = conn.execute(AFTER_FAILOVER)
    except psycopg.errors.UndefinedFunction:  # of an older version
        return False
    if has_skipped:
        log.warning("the server was promoted or recovered: ids and tokens were skipped")
    return conn.prepare_threshold is None


def one_by_one(
    call: Callable[[Sequence[Attempt]], T],
    attempts: Sequence[Attempt],
    refused: Callable[[Attempt, psycopg.Error], T],
) -> list[T]:
    """Call with all attempts; if that is refused, with each, and `refused` with those to blame."""
    try:
        return [call(attempts)] if attempts else []
    except psycopg.Error as error:
        if database.is_outage(error):
            raise
        if len(attempts) == 1:
            return [refused(attempts[0], error)]
    return [one for a in attempts for one in one_by_one(call, [a], refused)]


def _call(conn: Connection, query: str, params: Any, again: bool = False) -> list[Any]:
    with database.transaction(conn):
        if again:
            after_failover(conn)
        return conn.execute(query, params, binary=True).fetchall()


def _held(attempts: Sequence[Attempt]) -> tuple[str, str]:
    """Write ids and tokens as arrays, many times faster than psycopg adapts lists."""
    ids = "{" + ",".join([str(a.id) for a in attempts]) + "}"
    return ids, "{" + ",".join([str(a.token) for a in attempts]) + "}"
