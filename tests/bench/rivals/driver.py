"""What the Python drivers share: the verbs, the clock and the count of what was handled.

A driver gives `main` an object like Driver below. `python -m bench.rivals.NAME VERB JSON`
prints one line of JSON on stdout; whatever else is said goes to stderr.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager as Context
from typing import Any, Literal, Protocol

BULK = 5000  # jobs per bulk call
IDLE = 2.0  # seconds without a job after which a drain is over

Kind = Literal["noop", "nap", "latency"]
Handle = Callable[[int], Awaitable[None]]
Answer = dict[str, Any]


class Producer(Protocol):
    """Adds jobs with the payload {"n": n}."""

    async def add(self, n: int) -> None: ...

    async def add_many(self, numbers: Iterable[int]) -> None: ...


class Driver(Protocol):
    """One rival; depth and reset are SQL: the unfinished jobs, and to remove all jobs."""

    depth: str
    reset: str

    async def sql(self, statement: str) -> Any:
        """Run a statement; the first value, if it has one."""

    async def install(self) -> None:
        """Make the schema in an empty database."""

    def open(self, clients: int) -> Context[Producer]:
        """A producer with that many open connections, for as many concurrent adds."""

    def work(
        self, kind: Kind, handle: Handle, acknowledged: Callable[[], None]
    ) -> Context[None]:
        """A worker; on exit it has written its acknowledgements.

        It calls acknowledged() whenever completions have been committed.
        """


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Contiguous [first, last] ranges of distinct numbers."""
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and found[-1][1] == n - 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return found


async def install(driver: Driver) -> Answer:
    await driver.install()
    return {}


async def reset(driver: Driver) -> Answer:
    await driver.sql(driver.reset)
    return {}


async def depth(driver: Driver) -> Answer:
    return {"jobs": await driver.sql(driver.depth)}


async def bulk(driver: Driver, jobs: int) -> Answer:
    async with driver.open(1) as producer:
        start = time.monotonic()
        for first in range(0, jobs, BULK):
            await producer.add_many(range(first, min(first + BULK, jobs)))
        return {"seconds": time.monotonic() - start}


async def enqueue(driver: Driver, jobs: int, clients: int = 8) -> Answer:
    numbers = iter(range(jobs))

    async def client() -> None:
        for n in numbers:
            await producer.add(n)

    async with driver.open(clients) as producer:
        start = time.monotonic()
        await asyncio.gather(*(client() for _ in range(clients)))
        return {"seconds": time.monotonic() - start}


async def drain(
    driver: Driver, jobs: int, limit: float, nap: tuple[float, float] | None = None
) -> Answer:
    seen: set[int] = set()
    handled = 0
    start = active = last = time.monotonic()

    async def handle(n: int) -> None:
        nonlocal handled, active
        if nap:
            await asyncio.sleep(random.uniform(*nap))
        seen.add(n)
        handled += 1
        active = time.monotonic()

    def acknowledged() -> None:
        nonlocal last
        last = time.monotonic()

    async with driver.work("nap" if nap else "noop", handle, acknowledged):
        while handled < jobs and time.monotonic() - start < limit:
            await asyncio.sleep(0.01)
            if time.monotonic() - active < IDLE:
                continue
            if handled or await driver.sql(driver.depth) == 0:
                break
    return {
        "seconds": last - start,
        "seen": ranges(seen),
        "duplicates": handled - len(seen),
    }


async def latency(driver: Driver, jobs: int, every: float = 0.02) -> Answer:
    started: dict[int, float] = {}
    returned: dict[int, float] = {}

    async def handle(n: int) -> None:
        started.setdefault(n, time.monotonic())

    async with (
        driver.work("latency", handle, lambda: None),
        driver.open(1) as producer,
    ):
        await asyncio.sleep(1)  # until the worker is idle and listens
        start = time.monotonic()
        for n in range(jobs):
            await asyncio.sleep(max(0, start + n * every - time.monotonic()))
            await producer.add(n)
            returned[n] = time.monotonic()
        deadline = time.monotonic() + 10
        while len(started) < jobs and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
    return {"ms": [1000 * (started[n] - returned[n]) for n in sorted(started)]}


VERBS: dict[str, Callable[..., Coroutine[Any, Any, Answer]]] = {
    verb.__name__: verb
    for verb in (install, bulk, enqueue, drain, latency, depth, reset)
}


def main(driver: Driver) -> None:
    """Do the verb of the command line on uvloop's loop, print its answer."""
    import uvloop  # in the rivals' environments only

    verb, arguments = sys.argv[1], json.loads("".join(sys.argv[2:]) or "{}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answer = runner.run(VERBS[verb](driver, **arguments))
    print(json.dumps(answer))
