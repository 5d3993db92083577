"""The hygiene that Django gives to requests, for jobs."""

import contextlib
from collections.abc import Iterator

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db import close_old_connections, connections

from pgqueue.app import Middleware
from pgqueue.job import Job
from pgqueue.worker import event_loop


def fresh_connections(inner: Middleware | None = None) -> Middleware:
    """Let no attempt find a connection that another one broke; around `inner`, if given."""

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
    """Give the ORM of an async attempt a thread, as Django gives one to each request.

    With it goes a connection, which is closed at the end. Else all attempts would share one
    thread, and the connection there.
    """
    context = ThreadSensitiveContext()
    # Its own `async with` does no more, and cannot be had from a plain `with`. Nobody has to
    # set it back: each attempt has contextvars of its own.
    SyncToAsync.thread_sensitive_context.set(context)
    try:
        yield
    finally:
        if thread := SyncToAsync.context_to_thread_executor.pop(context, None):
            thread.submit(connections.close_all)
            thread.shutdown(wait=False)
