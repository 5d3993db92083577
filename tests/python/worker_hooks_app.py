"""An app with hooks, and handlers for them; headers tell the middleware what to do."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator

import pgqueue
from worker_app import note

IN_HOOKS = os.environ.get("IN_HOOKS", "")
loops: list[asyncio.AbstractEventLoop] = []


class Replaced(Exception):
    pass


@contextlib.contextmanager
def around(job: pgqueue.Job) -> Iterator[None]:
    what = (job.headers or {}).get("middleware")
    note("entered", job.id)
    if what == "raise before":
        raise Replaced("before")
    try:
        yield
    except BaseException as error:
        note(type(error).__name__, job.id)
        if what == "swallow":
            return
        if what == "replace":
            raise Replaced("instead") from error
        if what == "retry later":
            raise pgqueue.Retry(after=3600) from error
        raise
    note("passed", job.id)
    if what == "raise after":
        raise Replaced("after")


app = pgqueue.App(middleware=around)


@app.on_startup
def start() -> None:
    note("start", -1)
    if IN_HOOKS == "raise at start":
        raise ValueError("cannot start")
    if IN_HOOKS == "exit at start":
        sys.exit(0)
    if IN_HOOKS == "hang at start":
        time.sleep(60)


@app.on_startup
async def start_on_loop() -> None:
    note("start", -2)
    loops.append(asyncio.get_running_loop())
    await asyncio.sleep(0)
    if IN_HOOKS == "raise at async start":
        raise ValueError("cannot start")
    if IN_HOOKS == "hang at async start":
        await asyncio.sleep(60)


@app.on_shutdown
def end() -> None:
    note("end", -1)
    if IN_HOOKS == "raise at end":
        raise ValueError("cannot end")
    if IN_HOOKS == "hang at end":
        time.sleep(60)


@app.on_shutdown
async def end_on_loop() -> None:
    assert loops == [asyncio.get_running_loop()]
    note("end", -2)
    if IN_HOOKS == "raise at async end":
        raise ValueError("cannot end")
    if IN_HOOKS == "hang at async end":
        await asyncio.sleep(60)


RAISED = {
    "ValueError": lambda: ValueError("plain"),
    "Retry": lambda: pgqueue.Retry(after=3600),
    "Snooze": lambda: pgqueue.Snooze(3600),
    "Reject": lambda: pgqueue.Reject("never"),
    "SystemExit": lambda: SystemExit(3),
    "ExceptionGroup": lambda: ExceptionGroup("two", [ValueError(), KeyError()]),
}


def act(job: pgqueue.Job, raises: str | None) -> str:
    note("ran", job.id)
    if raises is not None:
        raise RAISED[raises]()
    return "done"


@app.job("sync")
def sync(job: pgqueue.Job, raises: str | None = None) -> str:
    return act(job, raises)


@app.job("async")
async def async_(job: pgqueue.Job, raises: str | None = None) -> str:
    assert loops == [asyncio.get_running_loop()]
    return act(job, raises)


@app.job("sync_transaction", transaction=True)
def sync_transaction(job: pgqueue.Job, raises: str | None = None) -> str:
    job.connection.execute("insert into effect values (%s)", (job.id,))
    return act(job, raises)


@app.job("async_transaction", transaction=True)
async def async_transaction(job: pgqueue.Job, raises: str | None = None) -> str:
    await job.connection.execute("insert into effect values (%s)", (job.id,))
    return act(job, raises)


@app.job("late", timeout=0.5)
async def late() -> None:
    await asyncio.sleep(60)


@app.job("hang")
def hang(job: pgqueue.Job) -> None:
    note("began", job.id)
    time.sleep(60)


@app.job("late_thread", timeout=0.5)
def late_thread(job: pgqueue.Job) -> None:
    hang.function(job)
