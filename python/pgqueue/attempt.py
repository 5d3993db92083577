"""One attempt of a job: what was claimed, and what to report about it."""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from pgqueue.app import App
from pgqueue.job import Job
from pgqueue.payload import decode
from pgqueue.task import Task

FIELDS = "job_id", "kind", "queue", "attempt", "token", "ms"  # of a line of the log
LARGEST_RESULT = 64_000_000  # bytes; pgqueue.finish() takes no more


@dataclass(slots=True, eq=False)
class Outcome:
    """What to report about an attempt; `none` if the server knows it, or the lease is lost."""

    name: Literal["complete", "fail", "reject", "release", "suspend", "none"]
    text: str | None = None  # result or what to wait for, as JSON; error; reason
    delay: timedelta | None = None
    until: datetime | None = None
    error: BaseException | None = None
    status: str = "completed"  # if the server need not be told


COMPLETED = Outcome("complete")
RELEASED = Outcome("release")
LOST = Outcome("none", status="lost")
SUSPENDED = Outcome("none", status="suspended")  # and committed
Connect = Callable[["Attempt"], AbstractAsyncContextManager[Any]]
NO_TASK = App().job("")(lambda: None)


class Unready(Exception):
    """The worker has no connection or thread for the handler: the job is not to blame."""


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
    connect: Connect = nullcontext  # begins the transaction of its handler
    ask: Any = None  # runs a statement of ours for it, outside that
    timeout: float | None = None  # seconds
    source: Any = None  # the worker's, see pgqueue.worker.sources; None in tests
    progress: tuple[str | None, ...] | None = None  # done, total, message
    expires: float = float("inf")  # monotonic, as all moments here
    is_cancelled: bool = False  # an operator asked it to stop
    connection: Any = None
    in_handler: bool = False  # the statements on its connection are the handler's
    started: float = 0.0
    has_timed_out: bool = False  # and its handler has not returned
    stops_since: float = 0.0  # when it was told to stop
    runs_in: asyncio.Task[None] | None = None  # if async and started
    outcome: Outcome = RELEASED
    steps: Any = None  # those of its job, if the handler takes the job

    def prepare(self, task: Task[Any, Any], timeout: float | None = None) -> None:
        """Note its handler, and the timeout: this one, unless the handler has its own."""
        self.task, seconds = task, task.policy.timeout or timeout
        self.timeout = None if seconds == math.inf else seconds

    def is_late(self, patience: float = 0.0) -> bool:
        if self.timeout is None:
            return False
        return time.monotonic() >= self.started + self.timeout + patience

    def timeout_error(self) -> TimeoutError:
        return TimeoutError(f"timed out after {self.timeout:g} seconds")

    def as_job(self, payload: Any) -> Job:
        """Return it as its handler sees it."""
        headers = None if self.headers is None else decode(self.headers)[0]
        deadline = None
        if self.timeout is not None:
            with suppress(OverflowError):  # after the year 9999
                deadline = datetime.now(UTC) + timedelta(seconds=self.timeout)
        row = (self.id, self.queue, self.kind, self.number, self.max_attempts)
        return Job(*row, payload, headers, deadline, self.batch_id, self)

    @property
    def fields(self) -> dict[str, Any]:
        """What a JSON log line says about it besides the message."""
        taken = time.monotonic() - self.started if self.started else 0.0
        job = self.id, self.kind, self.queue, self.number, self.token
        return dict(zip(FIELDS, (*job, round(taken * 1000, 1)), strict=True))

    def __str__(self) -> str:
        where = self.source.where if self.source else ""
        what = f"job {self.id} {self.kind!r} of {self.queue!r}{where}"
        return f"{what}, attempt {self.number}"
