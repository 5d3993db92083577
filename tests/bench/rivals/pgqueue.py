"""pgqueue itself: its worker as it comes, async handlers; naps 32 at a time.

Producers: the client on a pool of psycopg connections; bulk with lists of 5,000.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pgqueue
from pgqueue import loop, reporter

from bench.rivals.connections import Pool, borrowed, pool, sql
from bench.rivals.driver import Handle, Kind, main

NAPS = 32


class Producer:
    def __init__(self, connections: Pool) -> None:
        self.connections = connections

    async def add(self, n: int) -> None:
        async with borrowed(self.connections) as conn:
            await pgqueue.enqueue(conn, "bench", {"n": n})

    async def add_many(self, numbers: Iterable[int]) -> None:
        async with borrowed(self.connections) as conn:
            await pgqueue.enqueue_many(conn, "bench", [{"n": n} for n in numbers])


class Pgqueue:
    depth = "select count(*) from pgqueue.job"
    reset = "truncate pgqueue.job, pgqueue.run"
    sql = staticmethod(sql)

    async def install(self) -> None:
        await sql("create extension pgqueue")

    @asynccontextmanager
    async def open(self, clients: int) -> AsyncIterator[Producer]:
        async with pool(clients) as connections:
            yield Producer(connections)

    @asynccontextmanager
    async def work(
        self, kind: Kind, handle: Handle, acknowledged: Callable[[], None]
    ) -> AsyncIterator[None]:
        def telling(*args: Any) -> Any:
            answer = exchange(*args)
            if args[1]:
                acknowledged()
            return answer

        exchange = loop.exchange
        loop.exchange = reporter.exchange = telling
        app = pgqueue.App()

        @app.job("bench")
        async def bench(n: int) -> None:
            await handle(n)

        concurrency = NAPS if kind == "nap" else 10
        worker = loop.Worker(app, {"bench": 1}, concurrency=concurrency)
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            yield
        finally:
            worker.stop()
            await asyncio.to_thread(thread.join)


if __name__ == "__main__":
    main(Pgqueue())
