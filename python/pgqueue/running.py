"""Runs the handler of an attempt, with its middleware, transaction and span.

The worker and pgqueue.testing share it. It never raises: at most the job fails.
"""

import asyncio
import contextvars
import math
import os
import sys
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import psycopg

from pgqueue.attempt import COMPLETED, LOST, RELEASED, SUSPENDED, Attempt, Outcome
from pgqueue.client import LeaseLost
from pgqueue.drivers import call, either, run_without_loop, settled
from pgqueue.judge import completed, judge, not_stored
from pgqueue.payload import decode
from pgqueue.policy import Middleware, both
from pgqueue.steps import Steps

JSON = "%s::pg_catalog.jsonb"
COMPLETE = f"select pgqueue.complete(%s, %s, {JSON})"
CLOSING = 1.0  # seconds for a stream that an async handler has left
NO_MIDDLEWARE: Any = nullcontext()


def run(attempt: Attempt, middleware: Middleware | None) -> Outcome:
    """Run a `def` handler in this thread, in a context of its own, and judge it."""
    running = run_async(attempt, middleware)
    return contextvars.Context().run(run_without_loop, running)


async def run_async(attempt: Attempt, middleware: Middleware | None) -> Outcome:
    """Run a handler in this task, which runs nothing else, and judge it."""
    try:
        is_in_use = sys.modules.get("opentelemetry.trace") is not None
        # Or was it where the job was enqueued?
        if not is_in_use and "traceparent" not in (attempt.headers or ""):
            return await _run(attempt, middleware)
        from pgqueue import tracing

        return await tracing.traced(attempt, partial(_run, attempt, middleware), _told)
    except BaseException as error:  # raised by a sampler or a processor of spans
        return judge(attempt, error)


def _told(attempt: Attempt, outcome: Outcome) -> tuple[str, str | None]:
    """Name an outcome as pgqueue.finish() does, or `lost`, and the error if there is one."""
    if attempt.outcome is not RELEASED:  # given up, and what it returns is dropped
        outcome = attempt.outcome
    if outcome is LOST:
        return "lost", LeaseLost.__name__
    has_failed = outcome.name in ("fail", "reject")
    known = "suspend" if outcome is SUSPENDED else "complete"
    name = known if outcome.name == "none" else outcome.name
    return name, outcome.text if has_failed else None


async def _run(attempt: Attempt, middleware: Middleware | None) -> Outcome:
    """Run a handler, in a transaction if it wants one, and judge it."""
    generation = _forks
    try:
        if not attempt.task.policy.transaction:
            outcome = await _call(attempt, middleware)
            if outcome.name != "suspend" or attempt.steps.last is None:
                return outcome
            await attempt.steps.end()
            return SUSPENDED
        async with attempt.connect(attempt) as attempt.connection:
            attempt.in_handler = True
            try:
                outcome = await _call(attempt, middleware)
                if outcome.name == "suspend":
                    await attempt.steps.end()
            finally:
                attempt.in_handler = False
                if is_left := await _is_left(attempt.connection):
                    attempt.connection.pgconn.finish()
            if is_left:
                raise RuntimeError(
                    "the handler left its connection in a stream, copy or pipeline"
                )
            if outcome.name == "suspend":
                return SUSPENDED
            await check_result(attempt.connection, outcome)
            params = attempt.id, attempt.token, outcome.text
            await settled(call(attempt.connection, COMPLETE, params, list))
        return Outcome("none", outcome.text, error=outcome.error)
    except BaseException as error:  # whatever a handler raises only fails its own job
        return judge(attempt, error)
    finally:
        _end_fork(generation)


async def _is_left(conn: Any) -> bool:
    """Whether the handler has not ended a stream, copy or pipeline: all calls would wait for that."""
    if not conn.lock.locked():
        return bool(conn.pgconn.pipeline_status)
    if isinstance(conn, psycopg.AsyncConnection):  # a task may be closing it
        # Not asyncio.timeout(): that of Python 3.11.2 takes an earlier cancellation for its own end.
        with suppress(TimeoutError):
            await asyncio.wait_for(conn.lock.acquire(), CLOSING)
            conn.lock.release()
            return False
    # A call that waits, in another thread or task, will end.
    return getattr(conn, "waits_since", math.inf) == math.inf


async def check_result(conn: Any, outcome: Outcome) -> psycopg.Error | None:
    """Replace a result that the database's encoding lacks a character for: the work is done."""
    text = (outcome.text or "") if outcome.name == "complete" else ""
    is_stored = conn.info.parameter_status("server_encoding") == "UTF8"
    if is_stored or (text.isascii() and "\\u" not in text):
        return None
    try:
        async with either(conn.transaction()):
            await settled(call(conn, f"select {JSON} is null", (text,), list))
    except (psycopg.DataError, psycopg.NotSupportedError) as error:
        outcome.text, outcome.error = not_stored(error), error
        return error
    return None


async def _ask(attempt: Attempt, query: str, *params: Any) -> Any:
    """Return the rows of a statement of ours, from the handler's connection if it has one."""
    if attempt.connection is None:
        return await attempt.ask(attempt, query, *params)
    attempt.in_handler = False
    try:
        return await settled(call(attempt.connection, query, params, list))
    finally:
        attempt.in_handler = True


async def _call(attempt: Attempt, middleware: Middleware | None) -> Outcome:
    """Call the handler with its arguments, and the middleware around it."""
    generation = _forks
    if inner := attempt.task.policy.middleware:
        middleware = both(middleware, inner)
    payload, _ = decode(attempt.payload)
    arguments, around = attempt.task.arguments.read(payload), NO_MIDDLEWARE
    if attempt.task.arguments.takes_job or middleware:
        attempt.steps = Steps((attempt.id, attempt.token), partial(_ask, attempt))
        job = attempt.as_job(payload)
        if attempt.task.arguments.takes_job:
            arguments = {**arguments, "job": job}
        if middleware:
            around = middleware(job)
    outcome = COMPLETED  # also if the middleware swallows what the handler raises
    try:
        with around:
            try:
                result = attempt.task.function(**arguments)
                outcome = completed(await result if attempt.task.is_async else result)
            finally:
                _end_fork(generation)  # not in the transaction of its parent
            if attempt.is_late():
                raise attempt.timeout_error()
    except BaseException as error:
        if attempt.steps is None or not attempt.steps.is_end(error):
            raise
        if attempt.is_late():
            raise attempt.timeout_error() from None
        return Outcome("suspend", attempt.steps.terms)
    if attempt.steps is not None:
        attempt.steps.check()
    return outcome


_forks = 0  # between the first process and this one; getpid() takes longer


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "fork"):
    os.register_at_fork(after_in_child=_forked)


def _end_fork(generation: int) -> None:
    """End this process if the handler forked it and then returned or raised in it, too."""
    if _forks != generation:
        error = sys.exception()
        code = error.code if isinstance(error, SystemExit) else error
        os._exit(code & 255 if isinstance(code, int) else code is not None)
