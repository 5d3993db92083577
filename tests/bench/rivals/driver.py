"""What the Python drivers share: the verbs, the clock and the count of what was handled.

A driver gives `main` an object like Driver below. `python -m bench.rivals.NAME VERB JSON`
prints one line of JSON on stdout; whatever else is said goes to stderr.
"""

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager as Context
from typing import Any, Literal, Protocol

BULK = 5000  # jobs per bulk call
IDLE = 2.0  # seconds without a job after which a drain is over
AT_ONCE = 32  # handlers that sleep
RATE = 200  # jobs a second, of the kind "rates"
STEPS = 10  # of a job

Kind = Literal[
    "noop", "sync", "sleep", "latency", "groups", "rates"
]  # sync: noop, without async
Handle = Callable[[int], Coroutine[Any, Any, None]]
Answer = dict[str, Any]
Payload = dict[str, Any]


class Producer(Protocol):
    """Adds jobs whose payloads have a number n; a larger priority is more urgent.

    Where the payload of a job has a group, the job is one of that group.
    """

    async def add(self, payload: Payload) -> None: ...

    async def add_many(self, payloads: list[Payload], priority: int) -> None:
        """Where no SQL can fill its tables, it may be told that they are for tomorrow."""

    async def emit(self, n: int) -> None: ...


class Durable:
    """What a job does: STEPS steps, or wait for the event of its number; it says when.

    A handler that is run anew after it has waited says so again.
    """

    def __init__(self, waits: bool) -> None:
        self.waits = waits
        self.waiting: set[int] = set()
        self.ended = Bits()
        self.count = 0

    async def step(self) -> int:
        return 1

    def begun(self, n: int) -> None:
        self.waiting.add(n)

    def done(self, n: int) -> None:
        self.count += 1
        self.ended.add(n)


class Driver(Protocol):
    """One system."""

    async def sql(self, statement: str) -> Any:
        """Run a statement; the first value, if it has one."""

    async def install(self) -> None:
        """Make the schema in an empty database."""

    async def limit_groups(self) -> None:
        """Let the jobs of a group run one after the other, from here on."""

    def open(self, clients: int) -> Context[Producer]:
        """A producer with that many open connections, for as many concurrent adds."""

    def work(
        self, kind: Kind, handle: Handle, acknowledged: Callable[[], None]
    ) -> Context[None]:
        """A worker; on exit it has written its acknowledgements.

        It calls acknowledged() whenever completions have been committed.
        """

    # Only of those that have steps.

    async def emit(self, conn: Any, n: int) -> None:
        """Let the event happen that the job of this number waits for."""

    def work_steps(self, do: Durable) -> Context[None]:
        """A worker, whose jobs do that."""


def numbered(numbers: Iterable[int], size: int) -> list[Payload]:
    """Payloads of about so many bytes; random ones, which TOAST cannot make small."""
    if size == 0:
        return [{"n": n} for n in numbers]
    return [{"n": n, "pad": random.randbytes(size // 2).hex()} for n in numbers]


def grouped(payloads: list[Payload], busy: int, groups: int) -> list[Payload]:
    """The first `busy` jobs are of one group, the others of so many, in turn."""
    for payload in payloads:
        place = payload["n"] - busy
        payload["group"] = f"g{place % groups}" if place >= 0 else "busy"
    return payloads


async def install(driver: Driver, limited: bool = False) -> Answer:
    await driver.install()
    if limited:
        await driver.limit_groups()
    return {}


async def bulk(
    driver: Driver,
    jobs: int,
    first: int = 0,
    priorities: int = 1,
    size: int = 0,
    busy: int = 0,
    groups: int = 0,
    tomorrow: bool = False,
) -> Answer:
    """Add so many jobs, numbered from `first`, their priorities in turn.

    For tomorrow and more urgent than others: only those that no SQL can fill.
    """
    how = {"tomorrow": True} if tomorrow else {}
    most = min(BULK, 20_000_000 // max(size, 1))
    spent = 0.0
    async with driver.open(1) as producer:
        for place in range(first, first + jobs, most * priorities):
            end = min(place + most * priorities, first + jobs)
            for priority in range(priorities):
                payloads = numbered(range(place + priority, end, priorities), size)
                if groups:
                    payloads = grouped(payloads, busy, groups)
                start = time.monotonic()
                if payloads:
                    await producer.add_many(
                        payloads, 9 if tomorrow else priority, **how
                    )
                spent += time.monotonic() - start
    return {"seconds": spent}


async def enqueue(driver: Driver, limit: float, clients: int = 8) -> Answer:
    """Add jobs one by one for so many seconds."""
    numbers = itertools.count()

    async def client() -> None:
        while time.monotonic() < start + limit:
            await producer.add({"n": next(numbers)})

    async with driver.open(clients) as producer:
        start = time.monotonic()
        await asyncio.gather(*(client() for _ in range(clients)))
        return {"seconds": time.monotonic() - start, "jobs": next(numbers)}


class Bits:
    """A bit for each number, and how often one came again."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.twice = 0

    def add(self, n: int) -> None:
        if n // 8 >= len(self.bytes):
            self.bytes.extend(bytes(n // 8 + 1 - len(self.bytes)))
        self.twice += self.bytes[n // 8] >> n % 8 & 1
        self.bytes[n // 8] |= 1 << n % 8


async def drain(
    driver: Driver,
    jobs: int,
    limit: float,
    depth: str,
    sleeps: tuple[float, float] | None = None,
    kind: Kind = "noop",
) -> Answer:
    """Work until so many jobs ran here, nothing comes any more, or time is up.

    depth is SQL: the unfinished jobs. seen is a bit for each number, in hexadecimal
    bytes, the lowest first; waits are the percentiles 50 and 99 of the seconds until a
    job began, from the worker's start.
    """
    seen = Bits()
    waits: list[float] = []
    start = active = last = time.monotonic()

    async def handle(n: int) -> None:
        nonlocal active
        waits.append(time.monotonic() - start)
        if sleeps:
            await asyncio.sleep(random.uniform(*sleeps))
        seen.add(n)
        active = time.monotonic()

    def acknowledged() -> None:
        nonlocal last
        last = time.monotonic()

    cut = False
    async with driver.work("sleep" if sleeps else kind, handle, acknowledged):
        while len(waits) < jobs and not cut:
            await asyncio.sleep(0.01)
            cut = time.monotonic() - start > limit
            if time.monotonic() - active < IDLE:
                continue
            if waits or await driver.sql(depth) == 0:
                break
    waits.sort()
    percentiles = [waits[len(waits) * part // 100] for part in (50, 99) if waits]
    answer = {"seconds": last - start, "cut": cut, "waits": percentiles}
    return {**answer, "seen": seen.bytes.hex(), "twice": seen.twice}


async def groups(
    driver: Driver,
    few: int,
    busy: int,
    limit: float,
    folder: str,
    hold: float,
    kind: Kind = "groups",
) -> Answer:
    """Hold each job for so long, until the few not of the busy group are done or time is up.

    Several processes share the file "done" of the folder, which has a byte for each of those
    few that is done. The file `runs` has what ran here: a job's number, when it began and when
    it ended. All times are those of the machine's monotonic clock.
    """
    runs: list[tuple[int, float, float]] = []
    start = last = time.monotonic()

    async def handle(n: int) -> None:
        began = time.monotonic()
        await asyncio.sleep(hold)
        runs.append((n, began, time.monotonic()))

    def acknowledged() -> None:
        nonlocal last
        last = time.monotonic()

    told = done = 0
    progress = f"{folder}/done"
    with open(progress, "ab", buffering=0) as file:
        async with driver.work(kind, handle, acknowledged):
            while done < few and time.monotonic() - start < limit:
                await asyncio.sleep(0.01)
                new, told = runs[told:], len(runs)
                file.write(b"." * sum(n >= busy for n, _, _ in new))
                done = os.stat(progress).st_size
    log = f"{folder}/{os.getpid()}"
    with open(log, "w") as text:
        json.dump(runs, text)
    return {"start": start, "last": last, "cut": done < few, "runs": log}


async def steps(
    driver: Driver, jobs: int, limit: float, depth: str, waits: bool = False
) -> Answer:
    """Work until these jobs have ended, or time is up; where they wait, once all do, emit.

    The emits are one a commit, by 8 connections. depth is SQL: the unfinished jobs.
    """
    do = Durable(waits)
    start = time.monotonic()

    def is_late() -> bool:
        return time.monotonic() - start > limit

    async with driver.open(8) as producer, driver.work_steps(do):
        while waits and len(do.waiting) < jobs and not is_late():
            await asyncio.sleep(0.01)
        await asyncio.gather(*(producer.emit(n) for n in do.waiting))
        while (do.count < jobs or await driver.sql(depth)) and not is_late():
            await asyncio.sleep(0.01)
        seconds, cut = time.monotonic() - start, is_late()
    return {
        "seconds": seconds,
        "cut": cut,
        "seen": do.ended.bytes.hex(),
        "twice": do.ended.twice,
    }


async def latency(driver: Driver, jobs: int, every: float = 0.02) -> Answer:
    started: dict[int, float] = {}
    returned: dict[int, float] = {}
    handled = 0

    async def handle(n: int) -> None:
        nonlocal handled
        started.setdefault(n, time.monotonic())
        handled += 1

    async with (
        driver.work("latency", handle, lambda: None),
        driver.open(1) as producer,
    ):
        await asyncio.sleep(1)  # until the worker is idle and listens
        start = time.monotonic()
        for n in range(jobs):
            await asyncio.sleep(max(0, start + n * every - time.monotonic()))
            await producer.add({"n": n})
            returned[n] = time.monotonic()
        deadline = time.monotonic() + 10
        while len(started) < jobs and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
    found = [1000 * (started[n] - returned[n]) for n in sorted(started)]
    return {"ms": found, "twice": handled - len(started)}


async def sleepers(driver: Driver, jobs: int, sleeps: tuple[float, float]) -> Answer:
    """How many sleeps a second as many tasks do without a queue: no worker does more here."""
    left = iter(range(jobs))

    async def sleep() -> None:
        for _ in left:
            await asyncio.sleep(random.uniform(*sleeps))

    start = time.monotonic()
    await asyncio.gather(*(sleep() for _ in range(AT_ONCE)))
    return {"rate": jobs / (time.monotonic() - start)}


DOES = (install, bulk, enqueue, drain, groups, steps, latency, sleepers)
VERBS: dict[str, Callable[..., Coroutine[Any, Any, Answer]]] = {
    verb.__name__: verb for verb in DOES
}


def main(driver: Driver) -> None:
    """Do the verb of the command line on uvloop's loop, print its answer."""
    import uvloop  # in the rivals' environments only

    verb, arguments = sys.argv[1], json.loads("".join(sys.argv[2:]) or "{}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answer = runner.run(VERBS[verb](driver, **arguments))
    print(json.dumps(answer))
