"""What a handler sees: the app it registers with, its job, and what it may raise."""

import asyncio
import dataclasses
import inspect
import json
import time
import typing
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

H = TypeVar("H", bound=Callable[..., Any])


class Retry(Exception):
    """Fail this attempt and run again, after seconds or a timedelta or the backoff."""

    def __init__(
        self, after: float | timedelta | None = None, reason: str = "retry"
    ) -> None:
        super().__init__(reason)
        self.after = (
            timedelta(seconds=after) if isinstance(after, int | float) else after
        )


class Snooze(Exception):
    """Run again at a datetime or after a timedelta; the attempt is not counted."""

    def __init__(self, until: datetime | timedelta) -> None:
        super().__init__(f"snooze until {until}")
        if isinstance(until, datetime) and until.tzinfo is None:
            raise ValueError("until must have a time zone")
        self.until = until


class Reject(Exception):
    """Fail the job for good: it goes to the dead letters with this reason."""


class Job:
    """One attempt of a job, as its handler sees it."""

    __slots__ = (
        "attempt",
        "cancelled",
        "conn",
        "deadline",
        "expires",
        "extender",
        "handler",
        "headers",
        "id",
        "kind",
        "lease",
        "max_attempts",
        "payload",
        "queue",
        "report",
        "started",
        "task",
        "token",
    )

    def __init__(
        self,
        id: int,
        token: int,
        kind: str,
        queue: str,
        attempt: int,
        max_attempts: int,
        payload: Any,
        headers: Any,
        lease: float,
    ) -> None:
        self.id = id
        self.kind = kind
        self.queue = queue
        self.attempt = attempt  # 1 the first time
        self.max_attempts = max_attempts
        self.payload = payload
        self.headers = headers
        self.deadline: datetime | None = None  # when the timeout is over, in UTC
        self.cancelled = False  # an operator asked it to stop
        # The rest is the worker's. `expires` is in this machine's monotonic seconds.
        self.token = token
        self.lease = lease
        self.expires = float("inf")
        self.started = 0.0
        self.handler: Handler
        self.extender: Callable[[Job], bool]
        self.conn: Any = None
        self.task: asyncio.Task[Any] | None = None
        self.report: Report

    @property
    def lost(self) -> bool:
        """Whether the lease is over, by the server's word or this machine's clock."""
        return time.monotonic() >= self.expires

    def extend(self) -> bool:
        """Extend the lease now, and return whether to go on working.

        The worker does so by itself at a third of the lease. This one waits for a round
        trip (async: `await asyncio.to_thread(job.extend)`) and may raise psycopg.Error.
        """
        return self.extender(self)

    @property
    def connection(self) -> Any:
        """The connection whose transaction also completes the job (transaction=True).

        A psycopg.Connection, or in an async handler a psycopg.AsyncConnection.
        """
        if self.conn is None:
            raise RuntimeError("a connection needs @app.job(..., transaction=True)")
        return self.conn

    def __repr__(self) -> str:
        return f"<job {self.id} {self.kind!r} of {self.queue!r}, try {self.attempt}>"


@dataclasses.dataclass(slots=True)
class Report:
    """What to tell the server of a finished attempt."""

    verb: Literal["complete", "fail", "release", "done", "lost"]
    text: str | None = None  # the result in JSON, or the error
    after: timedelta | None = None
    until: datetime | timedelta | None = None
    permanent: bool = False


class Handler:
    """A function, and how its parameters are made of a job."""

    def __init__(
        self, function: Callable[..., Any], timeout: float | None, transaction: bool
    ) -> None:
        self.function = function
        self.timeout = timeout
        self.transaction = transaction
        self.is_async = inspect.iscoroutinefunction(function)
        parameters = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY)
        ]
        self.takes_job = any(p.name == "job" for p in parameters)
        others = [p for p in parameters if p.name != "job"]
        self.takes_payload = bool(others)
        self.model: tuple[str, Callable[[Any], Any]] | None = None
        if len(others) == 1 and (make := _model(function, others[0].name)):
            self.model = (others[0].name, make)

    def __call__(self, job: Job) -> Any:
        """Run the function, or return the coroutine of an async one."""
        payload = job.payload
        if self.model:
            name, make = self.model
            arguments = {name: make(payload)}
        elif not self.takes_payload and self.takes_job:
            return self.function(job=job)
        elif isinstance(payload, dict):
            arguments = payload
        else:
            raise TypeError(
                f"the payload is no JSON object but {type(payload).__name__}"
            )
        if self.takes_job:
            return self.function(**{**arguments, "job": job})
        return self.function(**arguments)


def _model(function: Callable[..., Any], name: str) -> Callable[[Any], Any] | None:
    """Find what makes a dataclass or pydantic model of a payload, if one is due."""
    try:
        annotation = typing.get_type_hints(function).get(name)
    except NameError:  # imported for type checkers only
        return None
    if validate := getattr(annotation, "model_validate", None):
        return typing.cast(Callable[[Any], Any], validate)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return lambda payload: annotation(**payload)
    return None


class App:
    """The handlers of a worker, by kind."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    def job(
        self,
        kind: str,
        *,
        timeout: float | timedelta | None = None,
        transaction: bool = False,
    ) -> Callable[[H], H]:
        """Make the decorated function, `def` or `async def`, the handler of a kind.

        A parameter named `job` gets the Job; the others get the payload's keys, or, if
        there is one and its annotation is a dataclass or a pydantic model, that.
        Returning completes the job and stores the result, which must be JSON; raising
        fails it; Retry, Snooze and Reject say the rest. A `def` runs in a thread.

        `timeout` (seconds or timedelta) fails an attempt that runs longer: an async one
        is cancelled; a thread cannot be, so it runs on and its result is dropped.
        With `transaction`, job.connection is in the transaction that completes the job:
        the handler's writes and the completion commit together, or not at all.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout

        def register(function: H) -> H:
            if kind in self.handlers:
                raise ValueError(f"the kind {kind!r} has a handler already")
            self.handlers[kind] = Handler(function, seconds, transaction)
            return function

        return register


# json.loads looks for white space on both sides, which takes as long as a short payload.
_decode = json.JSONDecoder().raw_decode


def begin(job: Job) -> None:
    """Decode what the handler will see, in its own thread, and set its deadline."""
    job.payload, _ = _decode(job.payload)
    if job.headers is not None:
        job.headers, _ = _decode(job.headers)
    if job.handler.timeout is not None:
        job.deadline = datetime.now(UTC) + timedelta(seconds=job.handler.timeout)
