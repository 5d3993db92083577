"""Turns what a handler returns or raises into the Outcome of its attempt."""

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Generator
from datetime import datetime, timedelta
from typing import Any

from pgqueue.attempt import COMPLETED, LARGEST_RESULT, LOST, Attempt, Outcome, Unready
from pgqueue.client import LeaseLost
from pgqueue.payload import decode, storable, to_json
from pgqueue.policy import MAX_ATTEMPTS, Policy, Reject, Retry, Snooze
from pgqueue.terminal import trace, unshown

NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # as JSON writes it


def completed(result: Any) -> Outcome:
    """Encode a result; one that cannot be stored is replaced by the reason.

    The work is done: if the attempt failed, it would be done again. Raises TypeError for a
    result that has not run yet.
    """
    if result is None:
        return COMPLETED
    if isinstance(result, Awaitable | Generator | AsyncGenerator):
        # As by a decorator that is not for async functions. pydantic would run a generator.
        kind = type(result).__name__
        raise TypeError(f"the handler returned a {kind}, which has not run")
    try:
        return Outcome("complete", _storable_json(result))
    except Exception as error:  # also what the result's own class raises
        return Outcome("complete", not_stored(error), error=error)


def not_stored(error: BaseException) -> str | None:
    return to_json({"not_stored": summary(error)}, "")


def _storable_json(result: Any) -> str:
    text = to_json(result, "result") or ""
    if (size := len(text)) > LARGEST_RESULT:
        raise ValueError(f"the result has {size} of at most {LARGEST_RESULT} bytes")
    if "\\u0000" in text and NUL.search(text):
        raise ValueError("the result has a NUL character")
    if "\\ud" in text:
        json.dumps(json.loads(text), ensure_ascii=False).encode()  # half a surrogate
    return text


def judge(attempt: Attempt, error: BaseException) -> Outcome:
    """Turn what a handler raised into what to report. It never raises."""
    try:
        return _judge(attempt, error)
    except BaseException:  # raised by the exception's own class
        return Outcome("fail", describe(error))


def _judge(attempt: Attempt, error: BaseException) -> Outcome:
    if isinstance(error, Unready):
        return Outcome("release", storable(str(error)), timedelta(seconds=1))
    renamed = "coroutine raised StopIteration"  # as it was when it left one of ours
    if isinstance(error.__cause__, StopIteration) and str(error) == renamed:
        error = error.__cause__
    cause = cause_of(error)
    if isinstance(cause, LeaseLost):
        return LOST
    if attempt.has_timed_out:
        error = cause = attempt.timeout_error()
    if isinstance(cause, Snooze):
        if isinstance(cause.until, datetime):
            return Outcome("release", until=cause.until)
        return Outcome("release", delay=max(cause.until, timedelta()))
    if isinstance(cause, asyncio.CancelledError) and not attempt.is_cancelled:
        if time.monotonic() >= attempt.expires:
            return LOST
        if attempt.is_late():
            error = cause = attempt.timeout_error()
    if is_final(error, attempt):
        return Outcome("reject", describe(cause), error=cause)
    delay = _backoff(attempt.task.policy, attempt.number)
    if isinstance(cause, Retry) and cause.after is not None:
        delay = max(cause.after, timedelta())
    return Outcome("fail", describe(cause), delay, error=cause)


def errors_in(error: BaseException) -> list[BaseException]:
    """List the errors in a group, as of an asyncio.TaskGroup, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [inner for one in error.exceptions for inner in errors_in(one)]
    return [error]


def cause_of(error: BaseException) -> BaseException:
    """Return the only error in a group; if it has several, or is no group, the error itself."""
    errors = errors_in(error)
    return errors[0] if len(errors) == 1 else error


def is_final(error: BaseException, attempt: Attempt) -> bool:
    policy = attempt.task.policy
    if policy.max_attempts is not None and attempt.number >= policy.max_attempts:
        # The job may have more: those that its queue gave it do not count, those in its header do.
        headers = decode(attempt.headers)[0] if attempt.headers else {}
        if not (isinstance(headers, dict) and headers.get(MAX_ATTEMPTS)):
            return True
    errors = [one for one in errors_in(error) if not isinstance(one, Retry)]
    if not errors:
        return False
    final = Reject, policy.give_up_on
    if any(isinstance(one, final) for one in (error, *errors)):
        return True
    if isinstance(error, policy.retry_for):
        return False
    return not all(isinstance(one, policy.retry_for) for one in errors)


def _backoff(policy: Policy, number: int) -> timedelta | None:
    """Double with each attempt, then subtract up to half; None leaves it to the queue."""
    if policy.retry_base is None:
        return None
    seconds = min(policy.retry_cap, policy.retry_base * 2.0 ** min(number - 1, 60))
    return timedelta(seconds=seconds * random.uniform(0.5, 1))


def summary(error: BaseException) -> str:
    return describe(error).partition("\n")[0]


def describe(error: BaseException) -> str:
    """Show an error: a summary in the first line, by which it is found; then the traceback."""
    try:
        said = " ".join(str(error)[:2000].split())
        text = f"{type(error).__name__}: {said[:500]}" if said else type(error).__name__
        if error.__traceback__:
            text += "\n\n" + trace(error)
    except BaseException as worse:
        text = unshown(error, worse)
    return storable(text)
