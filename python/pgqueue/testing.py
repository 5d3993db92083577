"""For the tests of applications: run jobs inline, and look at what was enqueued.

All on the test's own psycopg connection, and in its transaction if it has one, so that
a rollback leaves nothing. As a pytest plugin (`pytest_plugins = ["pgqueue.testing"]`)
it gives the fixture `pgqueue_conn`. (PYTEST_DONT_REWRITE: or pytest warns of tests that
import it, too.)
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psycopg

from pgqueue import database
from pgqueue.app import App, Job, begin
from pgqueue.client import to_json
from pgqueue.desk import judge
from pgqueue.exchange import CLAIM, finish
from pgqueue.lanes import COMPLETE

if TYPE_CHECKING:
    from collections.abc import Callable

    fixture: Callable[..., Any]
else:
    try:
        from pytest import fixture
    except ImportError:  # all but the fixture works without pytest

        def fixture(function):
            return function


ENQUEUED = (
    "select id, queue, kind, payload, priority, nullif(run_at, 'infinity'), attempt,"
    " unique_key, group_key, headers from pgqueue.job"
    " where (%(queue)s::text is null or queue = %(queue)s)"
    " and (%(kind)s::text is null or kind = %(kind)s) order by id"
)


@dataclass(frozen=True)
class Enqueued:
    """A job that waits or runs."""

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


@dataclass(frozen=True)
class Ran:
    """An attempt that drain made, and what became of it."""

    job: Job
    outcome: str  # completed, retry, dead, cancelled or released
    result: Any = None
    error: str | None = None


def enqueued(
    conn: psycopg.Connection[Any], queue: str | None = None, kind: str | None = None
) -> list[Enqueued]:
    """List the jobs that wait, oldest first. Reads pgqueue.job, as an operator may."""
    with conn.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
        rows = cursor.execute(ENQUEUED, {"queue": queue, "kind": kind}).fetchall()
    return [Enqueued(*row) for row in rows]


def assert_enqueued(
    conn: psycopg.Connection[Any],
    queue: str | None = None,
    kind: str | None = None,
    payload: Any = None,
    count: int | None = None,
) -> list[Enqueued]:
    """Assert that such jobs wait (one at least, or exactly `count`), and return them.

    An object as payload matches payloads that hold its keys and values.
    """
    waiting = enqueued(conn)
    found = [
        job
        for job in waiting
        if (queue is None or job.queue == queue)
        and (kind is None or job.kind == kind)
        and (payload is None or _holds(job.payload, payload))
    ]
    is_right = len(found) == count if count is not None else found
    assert is_right, f"{len(found)} such jobs among {waiting}"
    return found


def _holds(whole: Any, part: Any) -> bool:
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(key in whole and whole[key] == part[key] for key in part)
    return bool(whole == part)


def drain(
    conn: psycopg.Connection[Any],
    app: App,
    queues: Sequence[str] = ("default",),
    *,
    max_jobs: int = 1000,
    raises: bool = True,
) -> list[Ran]:
    """Run what is due, and what that enqueues, inline; return what became of each.

    An exception that would fail a job is raised, unless `raises` is false: then the job
    is failed as a worker would. Each handler runs in a savepoint of its own. With
    transaction=True it gets `conn`, in an async handler too: `await` is not for it then.
    """
    ran: list[Ran] = []
    while len(ran) < max_jobs and (job := _claim(conn, queues)):
        job.handler = app.handlers[job.kind]
        job.conn = conn if job.handler.transaction else None
        job.extender = lambda job: True
        ran.append(_run(conn, job, raises))
    return ran


def _claim(conn: psycopg.Connection[Any], queues: Sequence[str]) -> Job | None:
    for queue in queues:
        with conn.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
            cursor.execute(CLAIM, (queue, "pgqueue.testing", 1, 3600, None))
            if row := cursor.fetchone():
                return Job(*row)
    return None


def _run(conn: psycopg.Connection[Any], job: Job, raises: bool) -> Ran:
    try:
        begin(job)
        with conn.transaction():
            result = job.handler(job)
            if job.handler.is_async:
                result = asyncio.run(result)
            text = to_json(result, "result")
            conn.execute(COMPLETE, (job.id, job.token, text))
        return Ran(job, "completed", result)
    except Exception as error:
        job.report = report = judge(job, error)
        if (
            raises
            and report.verb == "fail"
            and report.after is None
            and not report.permanent
        ):
            raise
        with conn.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
            row = cursor.execute(*finish([job])).fetchone()
        return Ran(job, row[1] if row else "lost", error=report.text)


@fixture
def pgqueue_conn() -> Iterator[database.Connection]:
    """A connection whose transaction is rolled back after the test.

    To the database that PGQUEUE_DSN, DATABASE_URL or libpq's variables name.
    """
    with psycopg.connect(database.conninfo(None)) as conn:
        yield conn
        conn.rollback()
