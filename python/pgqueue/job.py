"""The job as its handler sees it."""

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, ParamSpec, TypeVar

from pgqueue.drivers import run_without_loop
from pgqueue.payload import storable
from pgqueue.steps import derived

Seconds = float | timedelta

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Job:
    """A job, and its running attempt."""

    id: int
    queue: str
    kind: str
    attempt: int  # 1 the first time
    max_attempts: int
    payload: Any  # decoded JSON
    headers: Any  # likewise; None without headers
    deadline: datetime | None  # the end of its timeout, in UTC; None without one
    batch_id: int | None  # the batch it is part of; None for none
    _attempt: Any = field(repr=False)  # the Attempt that it belongs to

    @property
    def cancelled(self) -> bool:
        """Whether an operator has called pgqueue.cancel(): stop soon."""
        return bool(self._attempt.is_cancelled)

    @property
    def lost(self) -> bool:
        """Whether the lease is lost, according to the server or this machine's clock."""
        return bool(time.monotonic() >= self._attempt.expires)

    def extend(self) -> bool:
        """Extend the lease now by pgqueue.extend(), and return whether to go on.

        The worker does so itself, at least three times per lease. This call blocks for a round
        trip (async: `await asyncio.to_thread(job.extend)`) and may raise psycopg.Error.
        """
        source = self._attempt.source
        return source is None or bool(source.heartbeat.extend(self._attempt))

    def progress(
        self,
        done: float | Decimal,
        total: float | Decimal | None = None,
        message: str | None = None,
    ) -> None:
        """Report progress by pgqueue.progress(), for others to see.

        It costs next to nothing: the worker sends the latest about once a second, in a thread
        of its own. Numbers that Postgres refuses only show up in the log.
        """
        attempt = self._attempt
        told = str(done), total, None if message is None else str(message)[:1000]
        attempt.progress = tuple(None if t is None else storable(str(t)) for t in told)
        if attempt.source is not None:
            attempt.source.heartbeat.tell(attempt)

    @property
    def connection(self) -> Any:
        """The connection whose transaction also completes the job (transaction=True).

        A psycopg.Connection, or in an async handler a psycopg.AsyncConnection. Raises
        RuntimeError for other handlers.
        """
        if self._attempt.connection is None:
            raise RuntimeError("a connection needs @app.job(..., transaction=True)")
        return self._attempt.connection

    # What the next attempt need not do again. In an async handler, await what these return.

    def step(
        self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a function once, and save by pgqueue.save_step() what it returned.

        Later attempts do not call it again: they return what was saved. It is stored as JSON
        and converted by the function's annotation, in the first attempt as well. With
        transaction=True it is saved in that transaction, else at once. A name that is used
        again in the same attempt is numbered: "page", "page 2", "page 3".

        Raises ValueError for a name that is empty, longer than 200 bytes in UTF-8, or not text
        to Postgres (NUL, half a character), before the call; TypeError for an annotation that
        needs pydantic, and for a value that JSON cannot hold; LeaseLost; and what the function
        raises, which is not saved.
        """
        steps = self._attempt.steps
        running = partial(function, *args, **kwargs)
        value: R = self._end(steps.step(steps.name(name), running, function))
        return value

    def sleep(self, name: str, interval: Seconds) -> Any:
        """Go on after seconds or a timedelta, counted from the first attempt that got here.

        Until then, or until an operator calls run_now, the job is suspended by
        pgqueue.suspend(), and occupies no worker. The name is one of a step.
        """
        steps, seconds = self._attempt.steps, to_timedelta(interval)
        return self._end(steps.sleep(steps.name(name), seconds))

    def wait_for(self, event: str, timeout: Seconds | None = None) -> Any:
        """Return the payload of an event; until pgqueue.emit() records it, suspend the job.

        With a timeout, in seconds or a timedelta, raises TimeoutError if the event has not
        happened by then, counted from the first attempt that got here, or if an operator
        calls run_now. Later attempts return or raise the same. A job waits for one thing at a
        time: of waits in parallel, the first decides for what, and the others come after it.
        """
        steps = self._attempt.steps
        seconds = None if timeout is None else to_timedelta(timeout)
        # With room for what will be added to it.
        name = steps.name(derived(f"wait for {event}", most=180))
        return self._end(steps.wait_for(event, name, seconds))

    def wait_for_jobs(self, ids: Sequence[int], timeout: Seconds | None = None) -> Any:
        """Return a list of the results of other jobs; until all have ended, suspend the job.

        Raises NotCompleted if one of them died or was cancelled, and, like wait_for,
        TimeoutError if they have not all ended within the timeout.
        """
        steps = self._attempt.steps
        seconds = None if timeout is None else to_timedelta(timeout)
        name = steps.name("wait for jobs")
        return self._end(steps.wait_for_jobs(name, ids, seconds))

    @property
    def results(self) -> Any:
        """How the jobs ended that it was enqueued after or suspended for: a list of Result.

        Calls pgqueue.results_of(). In the callback of a batch, it lists the jobs of the batch.
        """
        return self._end(self._attempt.steps.results())

    def _end(self, running: Coroutine[Any, Any, Any]) -> Any:
        """Run it to the end, or return it to be awaited if the handler is async."""
        if self._attempt.task.is_async:
            return self._attempt.steps.to_await(running)
        return run_without_loop(running)


def to_timedelta(value: Seconds) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, int | float):
        return timedelta(seconds=value)
    raise TypeError(f"neither seconds nor a timedelta: {value!r}")
