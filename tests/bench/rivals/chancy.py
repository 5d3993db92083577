"""chancy 0.26.0: AsyncExecutor, concurrency 100 (32 for jobs that sleep), eager_polling, uvloop.

The queue polls each second, and LISTEN/NOTIFY, on by default, wakes it. Completions are
written by the worker's own batches of up to 1,000, once a second and when it stops; the
interval can be set by an attribute of the worker, and is left at its default. Producers:
Chancy.push on a pool; bulk: Chancy.push_many(batch_size=1000).
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from chancy import Chancy, Job, Queue, Worker

from bench.rivals.connections import sql
from bench.rivals.driver import AT_ONCE, RATE, Handle, Kind, Payload, main

CONCURRENCY: dict[Kind, int] = {
    "noop": 100,
    "sleep": AT_ONCE,
    "latency": 100,
    "rates": AT_ONCE,
}
ENVIRONMENT = ""  # as a connection string: all from libpq's variables

log = logging.getLogger("bench.chancy")
log.setLevel(logging.WARNING)

handler: Handle | None = None  # what bench calls: jobs name functions of a module


async def bench(*, n: int, pad: str = "") -> None:
    assert handler
    await handler(n)


def new_job(payload: Payload, priority: int = 0) -> Job:
    return Job(func="__main__.bench", kwargs=payload, priority=priority)


def queue(kind: Kind) -> Queue:
    return Queue(
        "default",
        concurrency=CONCURRENCY[kind],
        executor=Chancy.Executor.Async,
        polling_interval=1,
        eager_polling=True,
        rate_limit=RATE if kind == "rates" else None,
        rate_limit_window=1 if kind == "rates" else None,
    )


class Producer:
    def __init__(self, chancy: Chancy) -> None:
        self.chancy = chancy

    async def add(self, payload: Payload) -> None:
        await self.chancy.push(new_job(payload))

    async def add_many(self, payloads: list[Payload], priority: int) -> None:
        jobs = [new_job(payload, priority) for payload in payloads]
        async for _ in self.chancy.push_many(jobs, batch_size=1000):
            pass


class ChancyDriver:
    sql = staticmethod(sql)

    async def install(self) -> None:
        async with Chancy(ENVIRONMENT, log=log) as chancy:
            await chancy.migrate()
            await chancy.declare(queue("noop"))

    @asynccontextmanager
    async def open(self, clients: int) -> AsyncIterator[Producer]:
        async with Chancy(
            ENVIRONMENT,
            log=log,
            min_connection_pool_size=clients,
            max_connection_pool_size=clients,
        ) as chancy:
            await chancy.pool.wait()
            yield Producer(chancy)

    @asynccontextmanager
    async def work(
        self, kind: Kind, handle: Handle, acknowledged: Callable[[], None]
    ) -> AsyncIterator[None]:
        class TellingWorker(Worker):
            async def flush(self) -> None:
                pending = bool(self._pending_updates) or not self.outgoing.empty()
                await super().flush()
                if pending:
                    acknowledged()

        global handler
        handler = handle
        async with Chancy(ENVIRONMENT, log=log) as chancy:
            await chancy.declare(queue(kind), upsert=True)
            async with TellingWorker(chancy, register_signal_handlers=False):
                yield


if __name__ == "__main__":
    main(ChancyDriver())
