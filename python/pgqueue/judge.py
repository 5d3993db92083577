"""Turns what comes of a handler into the Outcome of its attempt. It never raises."""

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Generator
from datetime import datetime, timedelta
from typing import Any, Literal

from pgqueue.attempt import (
    COMPLETED,
    LARGEST_RESULT,
    LOST,
    Attempt,
    Outcome,
    Unready,
    decode,
)
from pgqueue.client import LeaseLost
from pgqueue.payload import storable, to_json
from pgqueue.policy import MAX_ATTEMPTS, Policy, Reject, Retry, Snooze
from pgqueue.terminal import trace

NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # as JSON writes it


def completed(result: Any) -> Outcome:
    """Encode a result; one that cannot be stored is replaced by the reason.

    The work is done: to fail for want of a result would do it again.
    """
    if result is None:
        return COMPLETED
    try:
        return Outcome("complete", _storable_json(result))
    except Exception as error:  # also what the result's own class raises
        if isinstance(result, Awaitable | Generator | AsyncGenerator):
            kind = type(result).__name__  # as of an async function that was decorated
            raise TypeError(
                f"the handler returned a {kind}, which has not run"
            ) from None
        not_stored = to_json({"not_stored": summary(error)}, "")
        return Outcome("complete", not_stored, error=error)


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
        reason = storable(f"no connection for its handler: {error}")
        return Outcome("release", reason, timedelta(seconds=1))
    if isinstance(error, LeaseLost):
        return LOST
    if attempt.has_timed_out:
        error = attempt.timeout_error()
    if isinstance(error, Snooze):
        if isinstance(error.until, datetime):
            return Outcome("release", until=error.until)
        return Outcome("release", delay=max(error.until, timedelta()))
    if isinstance(error, asyncio.CancelledError) and not attempt.is_cancelled:
        if time.monotonic() >= attempt.expires:
            return LOST
        if attempt.is_late():
            error = attempt.timeout_error()
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
        headers = decode(attempt.headers)[0] if attempt.headers else {}
        if not (isinstance(headers, dict) and headers.get(MAX_ATTEMPTS)):
            return True
    if isinstance(error, Retry):
        return False
    if isinstance(error, Reject) or isinstance(error, policy.give_up_on):
        return True
    return not isinstance(error, policy.retry_for)


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
        text = f"{type(error).__name__}, which raised {type(worse).__name__} when shown"
    return storable(text)
