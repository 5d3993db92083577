"""pgqueue itself: its worker, async handlers, as it comes; naps 32 at a time.

Producers: the client on a pool of psycopg connections; bulk with lists of 5,000.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pgqueue
import psycopg
from pgqueue import loop, reporter

from bench.rivals.driver import Handle, Kind, main

NAPS = 32


class Producer:
    def __init__(self, pool: asyncio.Queue[psycopg.AsyncConnection]) -> None:
        self.pool = pool

    async def add(self, n: int) -> None:
        conn = await self.pool.get()
        await pgqueue.enqueue(conn, "bench", {"n": n})
        self.pool.put_nowait(conn)

    async def add_many(self, numbers: Iterable[int]) -> None:
        conn = await self.pool.get()
        await pgqueue.enqueue_many(conn, "bench", [{"n": n} for n in numbers])
        self.pool.put_nowait(conn)


class Pgqueue:
    depth = "select count(*) from pgqueue.job"
    reset = "truncate pgqueue.job, pgqueue.run"

    async def sql(self, statement: str) -> Any:
        async with await psycopg.AsyncConnection.connect(autocommit=True) as conn:
            cursor = await conn.execute(statement)
            row = await cursor.fetchone() if cursor.description else None
        return row and row[0]

    async def install(self) -> None:
        await self.sql("create extension pgqueue")

    @asynccontextmanager
    async def open(self, clients: int) -> AsyncIterator[Producer]:
        pool: asyncio.Queue[psycopg.AsyncConnection] = asyncio.Queue()
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(clients):
                conn = await psycopg.AsyncConnection.connect(
                    autocommit=True, prepare_threshold=0
                )
                pool.put_nowait(await stack.enter_async_context(conn))
            yield Producer(pool)

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
        loop.exchange = reporter.exchange = telling  # type: ignore[assignment]
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
