"""The handlers of the worker tests. They note what they do in the file $RAN."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import pgqueue
import pydantic

app = pgqueue.App()
RAN = os.environ.get("RAN", os.devnull)


def note(word: str, job_id: int) -> None:
    # One small append is atomic, from any number of threads and processes.
    with open(RAN, "a", buffering=1) as file:
        file.write(f"{word} {job_id}\n")


def may_go() -> bool:
    return Path(RAN + ".go").exists()


@app.job("noop")
def noop() -> None:
    pass


@app.job("mark")
def mark(job: pgqueue.Job) -> None:
    note("ran", job.id)


@app.job("amark")
async def amark(job: pgqueue.Job) -> dict[str, int]:
    await asyncio.sleep(0)
    note("ran", job.id)
    return {"attempt": job.attempt}


@app.job("effect", transaction=True)
def effect(job: pgqueue.Job) -> None:
    note("ran", job.id)
    job.connection.execute("insert into effect values (%s)", (job.id,))


@app.job("aeffect", transaction=True)
async def aeffect(job: pgqueue.Job) -> int:
    note("ran", job.id)
    await job.connection.execute("insert into effect values (%s)", (job.id,))
    return job.id


@app.job("hold")
def hold(job: pgqueue.Job) -> str:
    note("began", job.id)
    while not may_go():
        time.sleep(0.01)
    note("lost" if job.lost else "ran", job.id)
    return "held"


@app.job("ahold")
async def ahold(job: pgqueue.Job) -> str:
    note("began", job.id)
    try:
        while not may_go():
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        note("cancelled", job.id)
        raise
    note("ran", job.id)
    return "held"


@app.job("hold_effect", transaction=True)
def hold_effect(job: pgqueue.Job) -> None:
    job.connection.execute("insert into effect values (%s)", (job.id,))
    hold(job)


@app.job("polite")
def polite(job: pgqueue.Job) -> None:
    note("began", job.id)
    while job.extend():
        time.sleep(0.05)
    raise RuntimeError("stopped when told")


@app.job("nap")
def nap(job: pgqueue.Job, seconds: float) -> None:
    note("began", job.id)
    time.sleep(seconds)
    note("ran", job.id)


@app.job("slow", timeout=0.5)
def slow(job: pgqueue.Job) -> None:
    while not may_go():
        time.sleep(0.01)
    note("ran", job.id)


@app.job("aslow", timeout=timedelta(seconds=0.5))
async def aslow(job: pgqueue.Job) -> None:
    await asyncio.sleep(60)


@app.job("suicide")
def suicide(job: pgqueue.Job) -> None:
    note("ran", job.id)
    os.kill(os.getpid(), signal.SIGKILL)


@app.job("gil")
def gil() -> None:
    """Hold the interpreter for some seconds in one call."""
    time.sleep(0.5)
    sum(range(150_000_000))


@dataclass
class Person:
    name: str
    age: int = 0


@app.job("person")
def person(someone: Person) -> str:
    return f"{someone.name} {someone.age}"


class Order(pydantic.BaseModel):
    number: int
    due: date


@app.job("order")
async def order(order: Order, job: pgqueue.Job) -> str:
    return f"{order.number} by {order.due:%d.%m.%Y}"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text for this")


BAD = {
    "exception": lambda: ValueError("plain"),
    "base exception": lambda: BaseException("base"),
    "system exit": lambda: SystemExit(3),
    "keyboard interrupt": lambda: KeyboardInterrupt(),
    "generator exit": lambda: GeneratorExit(),
    "stop iteration": lambda: StopIteration(),
    "cancelled error": lambda: asyncio.CancelledError(),
    "timeout error": lambda: TimeoutError(),
    "unprintable": lambda: Unprintable(),
    "ten megabytes": lambda: ValueError("x" * 10_000_000),
    "nul": lambda: ValueError("a\0b"),
    "surrogate": lambda: ValueError("a\ud800b"),
    "not utf-8": lambda: ValueError(os.fsdecode(b"\xff\xfe")),
    "group": lambda: ExceptionGroup("many", [ValueError("one"), TypeError("two")]),
    "recursion": lambda: RecursionError("deep"),
    "memory": lambda: MemoryError(),
}
UNSTORABLE = {
    "nan": float("nan"),
    "nul in a result": {"a": ["b\0"]},
    "surrogate in a result": "\ud800",
    "no json": object(),
    "huge number": 10**200_000,
}


@app.job("bad")
def bad(case: str) -> object:
    if case in BAD:
        raise BAD[case]()
    return UNSTORABLE[case]


@app.job("abad")
async def abad(case: str) -> object:
    return bad(case)


@app.job("retry")
def retry(job: pgqueue.Job) -> None:
    if job.attempt == 1:
        raise pgqueue.Retry(after=0.2)


@app.job("retry_absurd")
def retry_absurd() -> None:
    raise pgqueue.Retry(after=timedelta(days=-5))


@app.job("snooze")
def snooze() -> None:
    raise pgqueue.Snooze(timedelta(hours=1))


@app.job("reject")
def reject() -> None:
    raise pgqueue.Reject("never will")


@app.job("headers")
def headers(job: pgqueue.Job, **payload: object) -> dict[str, object]:
    return {"headers": job.headers, "payload": payload, "attempt": job.attempt}
