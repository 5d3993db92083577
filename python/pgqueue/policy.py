"""How a handler runs and is retried, and what it may raise."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pgqueue.job import Job, Seconds, to_timedelta
from pgqueue.results import Portable

Exceptions = tuple[type[BaseException], ...]  # a single class works, too
Middleware = Callable[[Job], AbstractContextManager[Any]]
# The header of a job that was given more attempts than its handler has.
MAX_ATTEMPTS = "max_attempts"


class Retry(Portable):
    """Fail this attempt and retry: after seconds or a timedelta, or after the backoff."""

    after: timedelta | None = None

    def __init__(self, after: Seconds | None = None, reason: str = "retry") -> None:
        super().__init__(reason)
        self.after = None if after is None else to_timedelta(after)


class Snooze(Portable):
    """Run again at a datetime, or after seconds or a timedelta; this attempt is not counted."""

    until: datetime | timedelta = timedelta()

    def __init__(self, until: datetime | Seconds) -> None:
        super().__init__(f"snooze until {until}")
        if isinstance(until, datetime):
            if until.tzinfo is None:
                raise ValueError("until must have a time zone")
            self.until = until
        else:
            self.until = to_timedelta(until)


class Reject(Exception):
    """Fail the job for good: it is dead at once, for this reason."""


def to_seconds(value: Seconds | None) -> float | None:
    return None if value is None else to_timedelta(value).total_seconds()


def to_timeout(value: Seconds | None) -> float | None:
    """Read a timeout; math.inf means none."""
    seconds = math.inf if value == math.inf else to_seconds(value)
    if seconds is not None and not seconds > 0:
        raise ValueError(f"a timeout must be positive, not {value!r}")
    return seconds


def both(outer: Middleware | None, inner: Middleware | None) -> Middleware | None:
    """Make a middleware of two, either of which may be missing."""
    if outer is None or inner is None:
        return outer or inner

    @contextmanager
    def entered(job: Job) -> Iterator[None]:
        with outer(job), inner(job):
            yield

    return entered


@dataclass(frozen=True, slots=True)
class Policy:
    """How a handler runs, and how its failures are retried."""

    timeout: float | None = None  # seconds
    transaction: bool = False
    max_attempts: int | None = None
    retry_base: float | None = None  # seconds
    retry_cap: float = 3600.0
    retry_for: Exceptions = (BaseException,)
    give_up_on: Exceptions = ()
    middleware: Middleware | None = None  # of the app that it was included from

    def __post_init__(self) -> None:
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError("max_attempts must be at least 1")
        if min(self.retry_base or 0, self.retry_cap) < 0:
            raise ValueError("neither retry_base nor retry_cap can be negative")
        for given in self.retry_for, self.give_up_on:
            for one in given if isinstance(given, tuple) else (given,):
                if not (isinstance(one, type) and issubclass(one, BaseException)):
                    raise TypeError(
                        f"neither an exception nor a tuple of them: {given!r}"
                    )
