"""Handles database connections around jobs as Django does around requests."""

import contextlib
from collections.abc import Iterator

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db import close_old_connections, connections

from pgqueue.job import Job
from pgqueue.policy import Middleware
from pgqueue.worker import event_loop


def fresh_connections(inner: Middleware | None = None) -> Middleware:
    """Make a middleware that renews broken connections around each attempt and `inner`."""

    @contextlib.contextmanager
    def around(job: Job) -> Iterator[None]:
        hygiene = _in_own_thread if event_loop.is_in_this_thread() else _in_this_thread
        with hygiene(), inner(job) if inner else contextlib.nullcontext():
            yield

    return around


@contextlib.contextmanager
def _in_this_thread() -> Iterator[None]:
    """Close what is broken or older than CONN_MAX_AGE, before and after."""
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()


@contextlib.contextmanager
def _in_own_thread() -> Iterator[None]:
    """Give an async attempt a thread for the ORM, as Django gives one to each request.

    Its connection is closed at the end. Otherwise all attempts would share one thread and
    its connection.
    """
    context = ThreadSensitiveContext()
    # This is what `async with context` does, which a plain `with` cannot. It is not reset, as
    # each attempt has its own contextvars.
    SyncToAsync.thread_sensitive_context.set(context)
    try:
        yield
    finally:
        if thread := SyncToAsync.context_to_thread_executor.pop(context, None):
            thread.submit(connections.close_all)
            thread.shutdown(wait=False)
