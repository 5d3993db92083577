"""pgqueuer 1.6.0: asyncpg, uvloop, the durable install (all tables logged), one connection a worker.

The worker takes batches of 100 (50 for jobs that sleep, at most 100 tasks and 32 handlers
at once; 10, its default, for latency) and is woken by LISTEN/NOTIFY. Completions are
written by its own buffer, as many at once as the batch is large. Producers: a pool,
Queries.enqueue; bulk with lists of 5,000.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from bench.rivals.driver import AT_ONCE, Handle, Kind, Payload, main

RUN: dict[Kind, dict[str, int]] = {
    "noop": {"batch_size": 100},
    "sleep": {"batch_size": 50, "max_concurrent_tasks": 100},
    "latency": {"batch_size": 10},
}


class Producer:
    def __init__(self, queries: Queries) -> None:
        self.queries = queries

    async def add(self, payload: Payload) -> None:
        await self.queries.enqueue("bench", json.dumps(payload).encode())

    async def add_many(self, payloads: list[Payload], priority: int) -> None:
        contents: list[bytes | None] = [json.dumps(each).encode() for each in payloads]
        names, priorities = ["bench"] * len(payloads), [priority] * len(payloads)
        await self.queries.enqueue(names, contents, priorities)


class Pgqueuer:
    async def sql(self, statement: str) -> Any:
        connection = await asyncpg.connect()
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    async def install(self) -> None:
        connection = await asyncpg.connect()
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    @asynccontextmanager
    async def open(self, clients: int) -> AsyncIterator[Producer]:
        async with asyncpg.create_pool(min_size=clients, max_size=clients) as pool:
            yield Producer(Queries(AsyncpgPoolDriver(pool)))

    @asynccontextmanager
    async def work(
        self, kind: Kind, handle: Handle, acknowledged: Callable[[], None]
    ) -> AsyncIterator[None]:
        class TellingQueries(Queries):
            async def log_jobs(self, job_status: Any) -> None:
                await super().log_jobs(job_status)
                acknowledged()

        connection = await asyncpg.connect()
        driver = AsyncpgDriver(connection)
        worker = PgQueuer(driver, queries=TellingQueries(driver))
        gate = asyncio.Semaphore(AT_ONCE)

        @worker.entrypoint("bench")
        async def bench(job: Job) -> None:
            number = json.loads(job.payload or b"")["n"]
            if kind == "sleep":
                async with gate:
                    await handle(number)
            else:
                await handle(number)

        running = asyncio.create_task(worker.run(**RUN[kind]))
        try:
            yield
        finally:
            worker.shutdown.set()
            await running
            await connection.close()


if __name__ == "__main__":
    main(Pgqueuer())
