"""Handlers that remember steps and wait; each in three forms: def, async, and in a transaction."""

import asyncio
import contextlib
import os
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pgqueue

app = pgqueue.App()


def note(word: str, number: int = 1) -> None:
    with open(os.environ["RAN"], "a") as ran:
        ran.write(f"{word} {number}\n")


def effect(name: str) -> str:
    note(name)
    return f"did {name}"


async def aeffect(name: str) -> str:
    return effect(name)


def today(days: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=days)


async def atoday(days: int) -> datetime:
    return today(days)


def dies(job: pgqueue.Job, at: str) -> None:
    """Kill the worker here, in the first attempt that gets here."""
    mark = Path(f"{os.environ['RAN']}.{job.payload.get('die')}.{at}")
    if job.payload.get("die") == at and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@app.job("two")
def two(job: pgqueue.Job, **_: Any) -> list[str]:
    dies(job, "start")
    first = job.step("first", effect, "first")
    dies(job, "between")
    second = job.step("second", effect, "second")
    dies(job, "end")
    return [first, second]


@app.job("atwo")
async def atwo(job: pgqueue.Job, **_: Any) -> list[str]:
    dies(job, "start")
    first = await job.step("first", aeffect, "first")
    dies(job, "between")
    second = await job.step("second", aeffect, "second")
    dies(job, "end")
    return [first, second]


@app.job("typed")
def typed(job: pgqueue.Job, fail: bool) -> str:
    moments = [job.step("moment", today, days) for days in range(3)]
    assert moments == [today(days) for days in range(3)]
    assert job.step("moment 2", lambda: [1, (2,)]) == [1, [2]]
    assert job.step("nothing", lambda: None) is None
    if fail and job.attempt == 1:
        raise ValueError
    return moments[2].isoformat()


@app.job("atyped")
async def atyped(job: pgqueue.Job, fail: bool) -> str:
    moments = await asyncio.gather(
        *[job.step("moment", atoday, days) for days in range(3)]
    )
    assert moments == [today(days) for days in range(3)]
    assert await job.step("in a thread", asyncio.to_thread, effect, "thread")
    if fail and job.attempt == 1:
        raise ValueError
    return moments[2].isoformat()


@app.job("sleeps")
def sleeps(job: pgqueue.Job, seconds: float) -> str:
    job.step("before", effect, "before")
    job.sleep("a while", seconds)
    job.step("after", effect, "after")
    return f"attempt {job.attempt}"


@app.job("asleeps")
async def asleeps(job: pgqueue.Job, seconds: float) -> str:
    await job.step("before", aeffect, "before")
    await job.sleep("a while", timedelta(seconds=seconds))
    await job.step("after", aeffect, "after")
    return f"attempt {job.attempt}"


@app.job("tsleeps", transaction=True)
def tsleeps(job: pgqueue.Job, seconds: float) -> str:
    job.connection.execute("insert into written values ('before')")
    job.step("before", effect, "before")
    job.sleep("a while", seconds)
    job.connection.execute("insert into written values ('after')")
    job.step("after", effect, "after")
    return f"attempt {job.attempt}"


@app.job("tasleeps", transaction=True)
async def tasleeps(job: pgqueue.Job, seconds: float) -> str:
    await job.connection.execute("insert into written values ('before')")
    await job.step("before", aeffect, "before")
    await job.sleep("a while", seconds)
    await job.connection.execute("insert into written values ('after')")
    await job.step("after", aeffect, "after")
    return f"attempt {job.attempt}"


@app.job("waits")
def waits(job: pgqueue.Job, event: str, timeout: float | None) -> Any:
    try:
        got = job.wait_for(event, timeout=timeout)
    except TimeoutError:
        got = "too late"
    job.step("waited", effect, "waited")
    with contextlib.suppress(TimeoutError):
        assert got == "too late" or job.attempt == 1
    job.wait_for("go", timeout=30)
    return got


@app.job("awaits")
async def awaits(job: pgqueue.Job, event: str, timeout: float | None) -> Any:
    try:
        got = await job.wait_for(event, timeout=timeout)
    except TimeoutError:
        got = "too late"
    await job.step("waited", aeffect, "waited")
    await job.wait_for("go", timeout=timedelta(seconds=30))
    return got


@app.job("both")
async def both(job: pgqueue.Job) -> Any:
    """Two tasks that wait: the first to suspend ends both."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job.wait_for(event)) for event in ("one", "two")]
    return [task.result() for task in tasks]


@app.job("both_kinds")
async def both_kinds(job: pgqueue.Job, ids: list[int]) -> Any:
    jobs, event = job.wait_for_jobs(ids), job.wait_for("one")
    return await asyncio.gather(event, jobs)


@app.job("parent")
def parent(job: pgqueue.Job, ids: list[int]) -> Any:
    try:
        results = job.wait_for_jobs(ids)
    except pgqueue.NotCompleted as error:
        return [str(error), [r.outcome for r in error.results]]
    return results


@app.job("aparent")
async def aparent(job: pgqueue.Job, ids: list[int]) -> Any:
    return await job.wait_for_jobs(ids)


@app.job("wants")
def wants(job: pgqueue.Job, event: str) -> Any:
    return job.wait_for(event, timeout=0)


@app.job("locked_parent")
def locked_parent(job: pgqueue.Job, ids: list[int]) -> Any:
    note("begun")
    mark = Path(f"{os.environ['RAN']}.locked")
    while not mark.exists():
        time.sleep(0.01)
    return job.wait_for_jobs(ids)


@app.job("parent_for")
def parent_for(job: pgqueue.Job, ids: list[int], timeout: float) -> Any:
    try:
        results = job.wait_for_jobs(ids, timeout=timeout)
    except TimeoutError:
        results = "too late"
    job.step("waited", effect, "waited")
    job.wait_for("go")
    return results


@app.job("aparent_for")
async def aparent_for(job: pgqueue.Job, ids: list[int], timeout: float) -> Any:
    try:
        results = await job.wait_for_jobs(ids, timeout=timedelta(seconds=timeout))
    except TimeoutError:
        results = "too late"
    await job.step("waited", aeffect, "waited")
    await job.wait_for("go")
    return results


@app.job("follower")
def follower(job: pgqueue.Job) -> Any:
    return [[r.id, r.kind, r.outcome, r.result] for r in job.results]


@app.job("afollower")
async def afollower(job: pgqueue.Job) -> Any:
    return [[r.id, r.kind, r.outcome, r.result] for r in await job.results]


@app.job("child")
def child(job: pgqueue.Job, n: int) -> int:
    if n < 0:
        raise pgqueue.Reject("negative")
    return n * n


@app.job("swallows")
def swallows(job: pgqueue.Job) -> str:
    try:
        job.sleep("a while", 3600)
    except BaseException:
        note("swallowed")
    return "done"


@app.job("tswallows", transaction=True)
def tswallows(job: pgqueue.Job) -> str:
    with contextlib.suppress(BaseException):
        job.sleep("a while", 3600)
    with contextlib.suppress(BaseException):
        job.step("more", effect, "more")
    return "done"


@app.job("forgets")
async def forgets(job: pgqueue.Job) -> str:
    job.sleep("a while", 3600)
    return "done"


@app.job("cancels")
async def cancels(job: pgqueue.Job) -> str:
    """Cancel a task before it has begun."""
    task = asyncio.create_task(job.sleep("a while", 3600))
    task.cancel()
    await asyncio.wait([task])
    return "done"


@app.job("forgiving")
def forgiving(job: pgqueue.Job) -> str:
    with contextlib.suppress(Exception):
        job.sleep("a while", 0.2)
    return "done"
