"""Runs an attempt inline, in the session of the test."""

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from pgqueue.app import App
from pgqueue.attempt import Attempt, Outcome
from pgqueue.database import Connection
from pgqueue.drivers import call, either, is_in_transaction, lent, settled
from pgqueue.job import Job
from pgqueue.policy import Reject, Retry
from pgqueue.running import run, run_async
from pgqueue.worker import event_loop
from pgqueue.worker.protocol import finish


@dataclass(frozen=True)
class Ran:
    """An attempt that `drain` has run, and what happened to the job."""

    job: Job
    outcome: str  # completed, retry, dead, cancelled, released or suspended
    result: Any = None
    error: str | None = None


def run_inline(
    owner: Any, conn: Connection, app: App, attempt: Attempt, raises: bool
) -> Ran:
    attempt.started = time.monotonic()
    with _undo_if_broken(owner, conn):
        attempt.outcome = outcome = _attempt(conn, app, attempt)
        if conn.closed and outcome.error:
            raise outcome.error
    has_failed = outcome.name in ("fail", "reject")  # else it has a result
    is_planned = isinstance(outcome.error, Retry | Reject)
    status = outcome.status
    if outcome.name != "none":
        status = finish(conn, [attempt]).get(attempt.id, status)
    if raises and has_failed and outcome.error and not is_planned:
        raise outcome.error
    job = attempt.as_job(json.loads(attempt.payload))
    if has_failed:
        return Ran(job, status, error=outcome.text)
    if status == "suspended":
        return Ran(job, status)
    return Ran(job, status, None if outcome.text is None else json.loads(outcome.text))


@contextlib.contextmanager
def _undo_if_broken(owner: Any, conn: Connection) -> Iterator[None]:
    """Undo what a handler did if it left the transaction broken."""
    if not is_in_transaction(conn):
        yield
        return
    conn.execute("savepoint pgqueue_attempt")
    yield
    is_refused = getattr(owner, "needs_rollback", False)  # by Django
    if is_refused or conn.info.transaction_status == TransactionStatus.INERROR:
        conn.execute("rollback to savepoint pgqueue_attempt")
    if is_refused:
        owner.set_rollback(False)
    conn.execute("release savepoint pgqueue_attempt")


def _attempt(conn: Connection, app: App, attempt: Attempt) -> Outcome:
    is_async = attempt.task.is_async
    turn: Any = asyncio.Lock() if is_async else threading.Lock()
    attempt.connect = lambda _: _savepoint(conn, is_async, turn)
    attempt.ask = _ask
    if is_async:
        return _await(lambda: _in_time(attempt, run_async(attempt, app.middleware)))
    return _call(lambda: run(attempt, app.middleware))


async def _in_time(attempt: Attempt, running: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Cancel it when its time is up, as a worker does."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    if attempt.timeout is None or task is None:
        return await running
    timer = loop.call_later(attempt.timeout, task.cancel)
    try:
        return await running
    finally:
        timer.cancel()


@contextlib.asynccontextmanager
async def _savepoint(conn: Connection, is_async: bool, turn: Any) -> AsyncIterator[Any]:
    """Lend the session to a handler, in a savepoint of its own, or to its steps in turn."""
    make = psycopg.AsyncConnection if is_async else psycopg.Connection
    async with either(turn):
        with lent(conn, make) as loan:
            async with either(loan.transaction()):
                yield loan


async def _ask(attempt: Attempt, query: str, *params: Any) -> Any:
    async with attempt.connect(attempt) as loan:
        return await settled(call(loan, query, params, list))


def _call(function: Callable[[], Outcome]) -> Outcome:
    """Call it as a worker does: in a thread without an event loop."""
    if not event_loop.is_in_this_thread():
        return function()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _await(function: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
    """Run it on an event loop of its own, in another thread."""
    if "django.db" in sys.modules and not event_loop.is_in_this_thread():
        # Then sync_to_async comes back to this thread, where the test's connection is.
        from asgiref.sync import async_to_sync

        async def call() -> Outcome:  # async_to_sync wants it marked as async
            return await function()

        return async_to_sync(call)()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_run_on_loop, function).result()


def _run_on_loop(function: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
    with asyncio.Runner(loop_factory=event_loop.new_loop) as runner:
        return runner.run(function())
