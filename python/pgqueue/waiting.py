"""What happened to a job: ask, or wait for its end."""

import json
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from psycopg.waiting import Ready, Wait

from pgqueue import drivers
from pgqueue.drivers import either, on_any_connection, run_without_loop, settled

State = Literal[
    "scheduled", "ready", "running", "expired", "blocked",  # as in the view jobs
    "completed", "dead", "cancelled", "gone",
]  # fmt: skip
ENDS = ("completed", "dead", "cancelled", "gone")
AWAIT = "select extract(epoch from pgqueue.await(%s))::float"
# A pooler does not reveal the backend's process id, and a standby cannot listen.
SESSION = (
    "select pg_catalog.pg_backend_pid(), not pg_catalog.pg_is_in_recovery() and"
    " pg_catalog.current_setting('transaction_isolation')"
    " operator(pg_catalog.=) 'read committed', 'pgqueue'"
    " operator(pg_catalog.=) any (array(select pg_catalog.pg_listening_channels()))"
)


@dataclass(frozen=True, slots=True)
class Status:
    """A row of pgqueue.status(), without last_step, event and suspended_at; None if unknown."""

    id: int
    queue: str
    kind: str
    state: State
    attempt: int
    max_attempts: int | None
    priority: int | None
    enqueued_at: datetime | None
    run_at: datetime | None
    expires_at: datetime | None  # from then on no attempt starts
    claimed_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    done: Decimal | None
    total: Decimal | None
    message: str | None
    rate: Decimal | None  # a second
    time_left: timedelta | None
    result: Any  # decoded JSON, of a completed job
    last_error: str | None  # or why it was cancelled
    payload: Any  # decoded; these two are None unless the caller may read the table job
    errors: list[dict[str, Any]] | None  # oldest first: attempt, at, worker, error

    @property
    def has_ended(self) -> bool:
        return self.state in ENDS


# What drivers read each in its own way is selected as text, and read here.
READERS: dict[str, Callable[[str], Any]] = {
    "time_left": lambda text: timedelta(seconds=float(text)),
    **dict.fromkeys(("result", "payload", "errors"), json.loads),
}
COLUMNS = {name: f"s.{name}::pg_catalog.text" for name in READERS}
COLUMNS["time_left"] = "extract(epoch from s.time_left)::pg_catalog.text"
STATUS = "select {} from pgqueue.status(%s) as s".format(
    ", ".join(COLUMNS.get(f.name, f"s.{f.name}") for f in fields(Status))
)


def _as_status(rows: list[tuple[Any, ...]]) -> Status:
    # psycopg does not decode texts where the client's encoding is SQL_ASCII.
    row: list[Any] = [v.decode() if isinstance(v, bytes) else v for v in rows[0]]
    found = Status(*row)
    texts = {name: getattr(found, name) for name in READERS}
    known = {name: READERS[name](t) for name, t in texts.items() if t is not None}
    return replace(found, **known)


@on_any_connection
def status(conn: Any, job_id: int) -> Status:
    """Return what is known about a job: pgqueue.status().

    `conn` is as for `enqueue`; if it is async, await the status. Raises JobNotFound, or the
    driver's own error for PQ001, if nothing is known about the job.
    """
    return drivers.call(conn, STATUS, (job_id,), _as_status)


@on_any_connection
def wait(
    conn: Any, job_id: int, timeout: float | None = None, *, listen: bool = True
) -> Status:
    """Wait until a job has completed, died or been cancelled, and return its status.

    `conn` is a connection of psycopg 3, or Django's on it, outside a transaction, which nothing
    else uses meanwhile; if it is async, await the status. It sleeps until pgqueue notifies it.
    Behind a pooler, on a standby, outside READ COMMITTED, or with `listen` false, it polls:
    at first after milliseconds, then every second.

    Raises TimeoutError after `timeout` seconds, ValueError in a transaction or pipeline,
    TypeError for a connection of another driver, and JobNotFound if nothing is known about the
    job, such as after its end with keep_runs 0.
    """
    conn = drivers.of_psycopg(conn)
    waiting: Any = _Session(conn).wait(job_id, timeout, listen)
    is_async = isinstance(conn, psycopg.AsyncConnection)
    found: Status = waiting if is_async else run_without_loop(waiting)
    return found


class _Session:
    """A connection that hears notifications: without an event loop its methods await nothing."""

    def __init__(self, conn: Any) -> None:
        self._conn = conn
        self._has_heard = False
        if not conn.closed and conn.info.transaction_status != TransactionStatus.IDLE:
            raise ValueError("no notification arrives in a transaction: end it first")
        if conn.info.pipeline_status != PipelineStatus.OFF:
            raise ValueError("no notification arrives in a pipeline: end it first")

    async def wait(self, job_id: int, timeout: float | None, listen: bool) -> Status:
        began = time.monotonic()
        async with self.listening(listen) as listens:
            while True:
                if listens:
                    ((pause,),) = await self.fetch(AWAIT, job_id)
                if not listens or pause == 0:
                    found = _as_status(await self.fetch(STATUS, job_id))
                    if found.has_ended:
                        return found
                    pause = 0.01  # it was redriven meanwhile
                waited = time.monotonic() - began
                if not listens:
                    pause = min(1.0, 0.01 + waited / 10)
                if timeout is not None:
                    if waited >= timeout:
                        said = f"job {job_id} has not ended in {timeout:g} s"
                        raise TimeoutError(said)
                    pause = min(pause, timeout - waited)
                # Mostly it is another job's end: all waiting sessions are notified.
                await self.sleep(pause, deaf=min(pause, 0.1, waited / 10))

    async def fetch(self, query: str, *params: Any) -> list[tuple[Any, ...]]:
        """Run a statement in a transaction of its own; not prepared: a pooler may send the next one elsewhere."""
        conn, cursor = self._conn, self._conn.cursor(row_factory=tuple_row)
        query = drivers.spelled_for(cursor, query)
        async with either(nullcontext() if conn.autocommit else conn.transaction()):
            await settled(cursor.execute(query, params, prepare=False))
            return await settled(cursor.fetchall()) if cursor.description else []

    @asynccontextmanager
    async def listening(self, wanted: bool) -> AsyncIterator[bool]:
        """Listen, if notifications can arrive; leave the session as it was."""
        ((pid, may_listen, was_listening),) = await self.fetch(SESSION)
        if not (wanted and may_listen) or pid != self._conn.info.backend_pid:
            yield False
            return
        self._conn.add_notify_handler(self._hear)
        try:
            await self.fetch("listen pgqueue")
            yield True
        finally:
            self._conn.remove_notify_handler(self._hear)
            with suppress(psycopg.OperationalError):  # a broken one has raised already
                if not was_listening:  # first: await() may be refused
                    await self.fetch("unlisten pgqueue")
                await self.fetch("select pgqueue.await(null)")

    def _hear(self, notify: psycopg.Notify) -> None:
        if (notify.channel, notify.payload) == ("pgqueue", "end"):
            self._has_heard = True

    async def sleep(self, seconds: float, deaf: float) -> None:
        """Sleep this long, or until notified that a job ended, but at least `deaf` seconds."""
        began = time.monotonic()
        while (
            left := began + (deaf if self._has_heard else seconds) - time.monotonic()
        ) > 0:
            async with either(self._conn.lock):
                await settled(self._conn.wait(self._arrival(), min(left, 0.1)))
        self._has_heard = False

    def _arrival(self) -> Generator[Wait, Ready, None]:
        """Pass notifications to the handlers, including the caller's own.

        As notifies() does, which warns of handlers, and in psycopg 3.2 leaves them out.
        """
        yield Wait.R
        pgconn = self._conn.pgconn
        pgconn.consume_input()
        while notify := pgconn.notifies():
            pgconn.notify_handler(notify)
