"""One attempt of a job: runs its handler and turns the result into an Outcome.

The worker and pgqueue.testing share it. It never raises: at most the job fails.
"""

import asyncio
import contextvars
import json
import os
import random
import re
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from pgqueue import tracing
from pgqueue.app import (
    MAX_ATTEMPTS,
    App,
    Middleware,
    Policy,
    Reject,
    Retry,
    Snooze,
    Task,
)
from pgqueue.client import LeaseLost
from pgqueue.drivers import run_without_loop
from pgqueue.job import Job
from pgqueue.payload import to_json
from pgqueue.terminal import trace

COMPLETE = "select pgqueue.complete(%s, %s, %s::pg_catalog.jsonb)"
LARGEST_RESULT = 64_000_000  # bytes; pgqueue.finish() takes no more
NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # as JSON writes it


@dataclass(slots=True, eq=False)
class Outcome:
    """What to report of an attempt; `none` if the server knows, or the lease is lost."""

    name: Literal["complete", "fail", "reject", "release", "none"]
    text: str | None = None  # the result in JSON, or the error
    delay: timedelta | None = None
    until: datetime | None = None
    error: BaseException | None = None


COMPLETED = Outcome("complete")
RELEASED = Outcome("release")
LOST = Outcome("none")
NO_MIDDLEWARE: Any = nullcontext()
NO_TASK = App().job("")(lambda: None)


class Unready(Exception):
    """The worker has no connection for the handler: the job is not to blame."""


@dataclass(slots=True, eq=False)
class Attempt:
    """What was claimed, and its state in the worker."""

    id: int
    token: int
    kind: str
    queue: str
    number: int  # 1 the first time
    max_attempts: int
    payload: str  # JSON, until the handler's own thread or task decodes it
    headers: str | None
    lease: float  # seconds
    batch_id: int | None = None
    task: Task[Any, Any] = NO_TASK
    timeout: float | None = None  # seconds
    extender: Callable[["Attempt"], bool] = bool
    teller: Callable[["Attempt"], object] = bool
    progress: tuple[str, str | None, str | None] | None = None
    expires: float = float("inf")  # monotonic, as all moments here
    is_cancelled: bool = False  # an operator asked it to stop
    connection: Any = None
    waits_since: float = float("inf")  # for the server, by statements of ours
    started: float = 0.0
    stops_since: float = 0.0  # when it had to stop, by a timeout or otherwise
    runs_in: asyncio.Task[None] | None = None  # if async and begun
    outcome: Outcome = RELEASED

    def extend(self) -> bool:
        return self.extender(self)

    def tell(self, done: Any, total: Any = None, message: str | None = None) -> None:
        text = None if message is None else storable(str(message)[:1000])
        self.progress = (str(done), None if total is None else str(total), text)
        self.teller(self)

    def is_late(self, patience: float = 0.0) -> bool:
        if self.timeout is None:
            return False
        return time.monotonic() >= self.started + self.timeout + patience

    def as_job(self, payload: Any) -> Job:
        """Return it as its handler sees it."""
        headers = None if self.headers is None else _decode(self.headers)[0]
        deadline = None
        if self.timeout is not None:
            deadline = datetime.now(UTC) + timedelta(seconds=self.timeout)
        row = (self.id, self.queue, self.kind, self.number, self.max_attempts)
        return Job(*row, payload, headers, deadline, self.batch_id, self)

    @property
    def fields(self) -> dict[str, Any]:
        """What a JSON log line says about it besides the message."""
        taken = time.monotonic() - self.started if self.started else 0.0
        return {
            "job_id": self.id,
            "kind": self.kind,
            "queue": self.queue,
            "attempt": self.number,
            "token": self.token,
            "ms": round(taken * 1000, 1),
        }

    def __str__(self) -> str:
        return f"job {self.id} {self.kind!r} of {self.queue!r}, attempt {self.number}"


# json.loads also skips white space on both sides: twice the time for a short payload.
_decode = json.JSONDecoder().raw_decode

Connect = Callable[[], AbstractAsyncContextManager[Any]]


def run(attempt: Attempt, connect: Connect, middleware: Middleware | None) -> Outcome:
    """Run a `def` handler in this thread, in a context of its own, and judge it."""
    running = run_async(attempt, connect, middleware)
    return contextvars.Context().run(run_without_loop, running)


async def run_async(
    attempt: Attempt, connect: Connect, middleware: Middleware | None
) -> Outcome:
    """Run a handler in this task, which runs nothing else, and judge it."""
    try:
        span = None if tracing.tracer is None else tracing.start_span(attempt)
        if span is None:
            return await _run(attempt, connect, middleware)
        with tracing.current(span):
            outcome = await _run(attempt, connect, middleware)
            is_given_up = attempt.outcome is not RELEASED  # and what it returns dropped
            tracing.conclude(span, *_told(attempt.outcome if is_given_up else outcome))
        return outcome
    except BaseException as error:  # raised by a sampler or a processor of spans
        return judge(attempt, error)


def _told(outcome: Outcome) -> tuple[str, str | None]:
    """Name an outcome as pgqueue.finish() does, or `lost`, and the error if there is one."""
    if outcome is LOST:
        return "lost", LeaseLost.__name__
    if outcome.name in ("fail", "reject"):
        return outcome.name, outcome.text
    return "complete" if outcome.name == "none" else outcome.name, None


async def _run(
    attempt: Attempt, connect: Connect, middleware: Middleware | None
) -> Outcome:
    """Run a handler, in a transaction if it wants one, and judge it."""
    generation = _forks
    try:
        if not attempt.task.policy.transaction:
            return await _call(attempt, middleware)
        async with connect() as attempt.connection:
            outcome = await _call(attempt, middleware)
            params = attempt.id, attempt.token, outcome.text
            attempt.waits_since = time.monotonic()
            executed = attempt.connection.execute(COMPLETE, params)
            if attempt.task.is_async:
                await executed
        return Outcome("none", outcome.text, error=outcome.error)
    except BaseException as error:  # whatever a handler raises fails its job only
        return judge(attempt, error)
    finally:
        _end_fork(generation)


async def _call(attempt: Attempt, middleware: Middleware | None) -> Outcome:
    """Call the handler with its arguments, and the middleware around it."""
    payload, _ = _decode(attempt.payload)
    arguments, around = attempt.task.arguments.read(payload), NO_MIDDLEWARE
    if attempt.task.arguments.takes_job or middleware:
        job = attempt.as_job(payload)
        if attempt.task.arguments.takes_job:
            arguments = {**arguments, "job": job}
        if middleware:
            around = middleware(job)
    outcome = COMPLETED  # also if the middleware swallows what the handler raises
    with around:
        result = attempt.task.function(**arguments)
        outcome = completed(await result if attempt.task.is_async else result)
    return outcome


_forks = 0  # between the first process and this one; getpid() takes longer


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


def _end_fork(generation: int) -> None:
    """End this process if the handler forked it and then returned in it, too."""
    if _forks != generation:
        os._exit(0)


def completed(result: Any) -> Outcome:
    """Encode a result; one that cannot be stored is replaced by the reason.

    The work is done: to fail for want of a result would do it again.
    """
    if result is None:
        return COMPLETED
    try:
        return Outcome("complete", _storable_json(result))
    except Exception as error:  # also what the result's own class raises
        reason = describe(error).partition("\n")[0]
        return Outcome("complete", to_json({"not_stored": reason}, ""), error=error)


def _storable_json(result: Any) -> str:
    text = to_json(result, "result") or ""
    if len(text) > LARGEST_RESULT:
        raise ValueError(
            f"the result has {len(text)} of at most {LARGEST_RESULT} bytes"
        )
    if "\\u0000" in text and NUL.search(text):
        raise ValueError("the result has a NUL character")
    if "\\ud" in text:
        json.dumps(json.loads(text), ensure_ascii=False).encode()  # halves of pairs
    return text


def judge(attempt: Attempt, error: BaseException) -> Outcome:
    """Turn what a handler raised into what to report."""
    try:
        return _judge(attempt, error)
    except BaseException:  # raised by the exception's own class
        return Outcome("fail", describe(error))


def _judge(attempt: Attempt, error: BaseException) -> Outcome:
    if isinstance(error, Unready):
        return Outcome("release", delay=timedelta(seconds=1))
    if isinstance(error, Snooze):
        if isinstance(error.until, datetime):
            return Outcome("release", until=error.until)
        return Outcome("release", delay=max(error.until, timedelta()))
    if isinstance(error, LeaseLost):
        return LOST
    if isinstance(error, asyncio.CancelledError) and not attempt.is_cancelled:
        if time.monotonic() >= attempt.expires:
            return LOST
        if attempt.is_late():
            error = TimeoutError(f"timed out after {attempt.timeout:g} seconds")
    policy = attempt.task.policy
    is_final = _is_final(error, policy, attempt)
    delay = _backoff(policy, attempt.number)
    if isinstance(error, Retry) and error.after is not None:
        delay = error.after
    name: Literal["reject", "fail"] = "reject" if is_final else "fail"
    return Outcome(name, describe(error), delay, error=error)


def _is_final(error: BaseException, policy: Policy, attempt: Attempt) -> bool:
    if policy.max_attempts is not None and attempt.number >= policy.max_attempts:
        # The job may have more, which the queue gives to those that do not ask.
        headers = _decode(attempt.headers)[0] if attempt.headers else {}
        if not (isinstance(headers, dict) and headers.get(MAX_ATTEMPTS)):
            return True
    if isinstance(error, Retry):
        return False
    is_given_up = isinstance(error, (Reject, *policy.give_up_on))
    return is_given_up or not isinstance(error, policy.retry_for)


def _backoff(policy: Policy, number: int) -> timedelta | None:
    """Double with each attempt, then subtract up to half; None leaves it to the queue."""
    if policy.retry_base is None:
        return None
    seconds = min(policy.retry_cap, policy.retry_base * 2.0 ** min(number - 1, 60))
    return timedelta(seconds=seconds * random.uniform(0.5, 1))


def describe(error: BaseException) -> str:
    """Show an error: a summary in the first line, by which it is found; then the traceback."""
    try:
        said = " ".join(str(error)[:2000].split())
        text = f"{type(error).__name__}: {said[:500]}" if said else type(error).__name__
        if error.__traceback__:
            text += "\n\n" + trace(error)
    except BaseException as worse:
        text = f"{type(error).__name__}, which raised {type(worse).__name__} when shown"
    return storable(text)


def storable(text: str) -> str:
    """Escape what Postgres cannot store."""
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()
