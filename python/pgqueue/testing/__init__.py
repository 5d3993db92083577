"""For the tests of applications: look at what was enqueued, and run it inline.

All of it in the test's own transaction, so that a rollback leaves nothing. A connection may
be one of psycopg, of Django or of SQLAlchemy on psycopg, sync or async; none of these calls
is awaited.

As a pytest plugin (`pytest_plugins = ["pgqueue.testing"]`) it provides the fixture
`pgqueue_conn`. (PYTEST_DONT_REWRITE: else pytest warns when tests import it as well.)
"""

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psycopg

from pgqueue import database
from pgqueue.app import App
from pgqueue.attempt import Attempt
from pgqueue.database import Connection
from pgqueue.drivers import is_in_transaction, lent
from pgqueue.testing.attempts import Ran, run_inline
from pgqueue.worker.protocol import claim

__all__ = ["Enqueued", "Ran", "assert_enqueued", "drain", "enqueued", "pgqueue_conn"]

if TYPE_CHECKING:
    fixture: Callable[..., Any]
else:
    try:
        from pytest import fixture
    except ImportError:  # all but the fixture works without pytest

        def fixture(function):
            return function


ENQUEUED = """
    select id, queue, kind, payload, priority,
        case when pg_catalog.isfinite(run_at) then run_at end, attempt, unique_key, group_key,
        headers
    from pgqueue.job
    where (%(queue)s::pg_catalog.text is null or queue operator(pg_catalog.=) %(queue)s)
        and (%(kind)s::pg_catalog.text is null or kind operator(pg_catalog.=) %(kind)s)
    order by id
"""
# A visible row whose writer is still in progress was written by this transaction: itself, or
# one of its savepoints, whose id is greater. So no other session's row is touched or locked.
# (xmin lacks the upper half of an id.)
CANDIDATE = """
    from (
        select pg_catalog.pg_current_xact_id_if_assigned()::pg_catalog.text::bigint,
            pg_catalog.clock_timestamp()
    ) as t (id, moment), pgqueue.job as j, lateral (
        select (j.xmin::pg_catalog.text::bigint operator(pg_catalog.-) t.id)
            operator(pg_catalog.&) 4294967295
    ) as later (by)
    where j.lease_expires_at is null
        and (%(queues)s::pg_catalog.text[] is null
            or j.queue operator(pg_catalog.=) any (%(queues)s))
        and (%(committed)s or case when later.by operator(pg_catalog.<) 2147483648
            then pg_catalog.pg_xact_status(
                (t.id operator(pg_catalog.+) later.by)::pg_catalog.text::pg_catalog.xid8
            ) operator(pg_catalog.=) 'in progress'
        end)
"""
NEXT = f"""
    select j.id, j.queue, j.group_key {CANDIDATE} and j.run_at operator(pg_catalog.<=) t.moment
    order by pg_catalog.array_position(%(queues)s, j.queue), j.priority desc, j.run_at, j.id
    limit 1
"""
# Make them due now, in their order.
MAKE_DUE = f"""
    update pgqueue.job
    set run_at = due.moment
        operator(pg_catalog.-) (due.place operator(pg_catalog.*) interval '1 microsecond')
    from (
        select j.id, t.moment,
            pg_catalog.row_number() over (order by j.run_at desc, j.id desc) as place
        {CANDIDATE} and j.run_at operator(pg_catalog.>) t.moment
            and pg_catalog.isfinite(j.run_at)
    ) as due
    where job.id operator(pg_catalog.=) due.id
"""
MOVE = (
    "update pgqueue.job set queue = %s, group_key = %s"
    " where id operator(pg_catalog.=) %s and queue operator(pg_catalog.=) %s"
)


@dataclass(frozen=True)
class Enqueued:
    """A waiting or running job."""

    id: int
    queue: str
    kind: str
    payload: Any
    priority: int
    run_at: datetime | None
    attempt: int
    unique_key: str | None
    group_key: str | None
    headers: dict[str, Any] | None


def enqueued(
    conn: Any, queue: str | None = None, kind: str | None = None
) -> list[Enqueued]:
    """List the waiting and running jobs, oldest first; reads the table pgqueue.job."""
    with lent(conn) as session:
        rows = session.execute(ENQUEUED, {"queue": queue, "kind": kind}).fetchall()
    return [Enqueued(*row) for row in rows]


def assert_enqueued(
    conn: Any,
    queue: str | None = None,
    kind: str | None = None,
    payload: Any = None,
    count: int | None = None,
) -> list[Enqueued]:
    """Assert that such jobs wait (at least one, or exactly `count`), and return them.

    A dict as payload matches payloads that have its keys and values.
    """
    found = [
        job
        for job in enqueued(conn, queue, kind)
        if payload is None or _holds(job.payload, payload)
    ]
    if len(found) != count if count is not None else not found:
        # Not by a statement `assert`, which `python -O` leaves out.
        raise AssertionError(f"{len(found)} such jobs among {enqueued(conn)}")
    return found


def _holds(whole: Any, part: Any) -> bool:
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(key in whole and whole[key] == part[key] for key in part)
    return bool(whole == part)


def drain(
    conn: Any,
    app: App,
    queues: str | Sequence[str] | None = None,
    *,
    max_jobs: int = 1000,
    raises: bool = True,
    scheduled: bool = False,
    committed: bool = False,
) -> list[Ran]:
    """Run the due jobs that this transaction has enqueued, and those that they enqueue.

    Returns what happened to each, in the order in which a worker would start them. `queues`
    are emptied one after the other; None is all of them at once. With `scheduled`, jobs that
    are due later run as well, once: what is put off or enqueued for later meanwhile waits
    for the next drain.

    Jobs of other transactions are neither run nor locked, except with `committed`: then all
    are run, for tests whose code commits, in a database of their own. Without it, raises
    ValueError unless a transaction is open.

    One job runs at a time, whatever the limits, rates and pauses of its queue, its kind there
    or its group. Raises RuntimeError if max_running, a rate or a pause of all queues
    (`configure(null, ...)`) keeps a job from running: no transaction may use the permits
    that it created itself.

    What a handler raises fails its job, as with a worker, and is raised, except Retry, Snooze
    and Reject; with `raises` false nothing is. A handler with transaction=True gets this
    session, in a savepoint. Raises LookupError for a kind without a handler. The role must own
    the table pgqueue.job.
    """
    names = [queues] if isinstance(queues, str) else queues and list(queues)
    which = {"queues": names, "committed": committed}
    ran: list[Ran] = []
    with lent(conn) as session:
        if not committed and not is_in_transaction(session):
            raise ValueError(
                "drain runs what its transaction enqueued, and this connection is in none;"
                " committed=True runs whatever is in the database"
            )
        if scheduled:
            session.execute(MAKE_DUE, which)
        while len(ran) < max_jobs and (attempt := _claim(session, which)):
            task = app.find(attempt.kind)
            if task is None:
                raise LookupError(f"the app has no handler for kind {attempt.kind!r}")
            attempt.prepare(task)
            ran.append(run_inline(conn, session, app, attempt, raises))
    return ran


def _claim(conn: Connection, which: dict[str, Any]) -> Attempt | None:
    """Claim the next job as a worker would, and no other: from a queue of its own."""
    aside = f"pgqueue.testing {secrets.token_hex(8)}"
    if not conn.execute(NEXT, which).fetchone():
        # Any claim makes due what waits for an event that has happened.
        claim(conn, "pgqueue.testing", [aside], 1)
    while row := conn.execute(NEXT, which).fetchone():
        job_id, queue, group_key = row
        with conn.transaction():
            conn.execute(MOVE, (aside, None, job_id, queue))
            attempts = claim(conn, "pgqueue.testing", [aside], 1, lease=3600)
            moved = conn.execute(MOVE, (queue, group_key, job_id, aside))
            if not attempts and moved.rowcount:
                raise RuntimeError(
                    f"job {job_id} is due, and a max_running, rate or pause of all queues keeps"
                    " drain from it; one that is set for a queue by its name does not"
                )
        # An expired job is cancelled instead.
        for attempt in attempts:
            attempt.queue = queue
            return attempt
    return None


@fixture
def pgqueue_conn() -> Iterator[Connection]:
    """A connection to PGQUEUE_TEST_DSN; after the test its transaction is rolled back.

    In it `conn.transaction()` is a savepoint, and `conn.commit()` raises
    psycopg.ProgrammingError. Raises LookupError if the variable is not set.
    """
    dsn = os.environ.get("PGQUEUE_TEST_DSN")
    if not dsn:
        raise LookupError(
            "pgqueue_conn needs PGQUEUE_TEST_DSN, the address of a database for tests"
            " (PGQUEUE_DSN and DATABASE_URL are not asked: they may name production)"
        )
    conn = psycopg.connect(database.conninfo(dsn))
    with conn, conn.transaction(force_rollback=True):
        yield conn
