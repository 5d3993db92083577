"""Watches over handlers: ends what must not go on, and says what does not react."""

import time
from asyncio import CancelledError

from pgqueue.attempt import Attempt
from pgqueue.judge import judge
from pgqueue.worker.executor import Executor
from pgqueue.worker.seldom import SELDOM, log

# Seconds
REACT = 10.0  # for a handler to stop after a cancellation, before a warning
DELIVERY = 1.0  # for the event loop to deliver a cancellation
RETURN = 10.0  # for a thread to return after its timeout: so long it keeps its lease
CLEAN_UP = 30.0  # for an async handler to end after its timeout, before it is given up
NAMED = 5  # of the handlers that may block the loop
STALE = 1.0  # without a new attempt: other workers get those that wait


def check(executor: Executor) -> None:
    """Stop what must not go on; to be called several times a second. It needs no server.

    Raises RuntimeError when a thread has ended, or no slot can work any more.
    """
    now = time.monotonic()
    for attempt in list(executor.running):
        if attempt.started:
            _check_handler(executor, attempt, now)
    if now > executor.began_at + STALE:
        executor.release_waiting()
    _check_loop(executor)
    executor.check()
    if _is_stuck(executor):
        raise RuntimeError("handlers that do not end occupy all slots or the loop")


def _check_handler(executor: Executor, attempt: Attempt, now: float) -> None:
    must_stop = attempt.is_cancelled or now >= attempt.expires
    is_async = attempt.task.is_async
    if is_async:
        patience = CLEAN_UP if attempt.stops_since else DELIVERY
        if not attempt.stops_since and (must_stop or attempt.is_late()):
            executor.cancel(attempt)
    else:
        patience = RETURN
        if must_stop and not attempt.stops_since:
            attempt.stops_since = now
    if not attempt.has_timed_out and attempt.is_late(patience if is_async else 0):
        attempt.has_timed_out = True
        log.warning("%s timed out, still runs in its slot", attempt)
    is_over = attempt.is_late(patience)
    if not is_over and attempt.stops_since and now > attempt.stops_since + REACT:
        attempt.stops_since = now
        again = {"seldom": attempt.id}
        log.warning("%s was told to stop and does not react", attempt, extra=again)
        is_over = attempt.is_cancelled
    if is_over:
        executor.give_up(attempt, judge(attempt, CancelledError()))


def _check_loop(executor: Executor) -> None:
    """Leave to other workers what a blocked event loop does not start."""
    on_loop = _async(executor.running)
    if executor.loop.probe():
        began = [a for a in on_loop if a.started]
        names = "; ".join(map(str, began[:NAMED])) + "; …" * (len(began) > NAMED)
        log.warning("a handler blocks the event loop: one of %s", names, extra=SELDOM)
    if executor.loop.is_blocked:
        for attempt in on_loop:
            if not attempt.started:
                executor.take_back(attempt)
        executor.submit(())


def _is_stuck(executor: Executor) -> bool:
    loop, given_up = executor.loop, executor.given_up
    return (
        (loop.is_blocked and _async(given_up) != [])
        or (loop.is_dead and _async(executor.running) == [])
        or len(given_up) >= executor.concurrency
    )


def _async(attempts: set[Attempt]) -> list[Attempt]:
    return [a for a in list(attempts) if a.task.is_async]
