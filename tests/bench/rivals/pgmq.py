"""pgmq: read(100) and delete(bigint[]) on one psycopg connection, prepared; naps 32 at a time.

For latency the queue notifies without throttle, and the worker listens. Producers: send on
a pool of connections; bulk: send_batch of 5,000. pgmq's SQL comes with its package.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

import psycopg

from bench.rivals.driver import Handle, Kind, main

NAPS = 32
QUANTITY: dict[Kind, int] = {"noop": 100, "nap": 50, "latency": 10}


class Producer:
    def __init__(self, pool: asyncio.Queue[psycopg.AsyncConnection]) -> None:
        self.pool = pool

    async def _run(self, query: str, argument: Any) -> None:
        conn = await self.pool.get()
        await conn.execute(query, (argument,))
        self.pool.put_nowait(conn)

    async def add(self, n: int) -> None:
        await self._run("select pgmq.send('bench', %s::jsonb)", json.dumps({"n": n}))

    async def add_many(self, numbers: Iterable[int]) -> None:
        payloads = [json.dumps({"n": n}) for n in numbers]
        await self._run(
            "select pgmq.send_batch('bench', %s::text[]::jsonb[])", payloads
        )


class Pgmq:
    depth = "select count(*) from pgmq.q_bench"
    reset = "truncate pgmq.q_bench"

    async def sql(self, statement: str) -> Any:
        async with await psycopg.AsyncConnection.connect(autocommit=True) as conn:
            cursor = await conn.execute(statement)
            row = await cursor.fetchone() if cursor.description else None
        return row and row[0]

    async def install(self) -> None:
        script = resources.files("pgmq").joinpath("sql/pgmq.sql").read_text()
        await self.sql("create schema if not exists pgmq")
        await self.sql(script)
        await self.sql("select pgmq.create('bench')")

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
        is_over = asyncio.Event()
        if kind == "latency":
            await self.sql("select pgmq.enable_notify_insert('bench', 0)")
        task = asyncio.create_task(self._work(kind, handle, acknowledged, is_over))
        try:
            yield
        finally:
            is_over.set()
            await task
            if kind == "latency":
                await self.sql("select pgmq.disable_notify_insert('bench')")

    async def _work(
        self,
        kind: Kind,
        handle: Handle,
        acknowledged: Callable[[], None],
        is_over: asyncio.Event,
    ) -> None:
        gate = asyncio.Semaphore(NAPS)

        async def nap(n: int) -> None:
            async with gate:
                await handle(n)

        async with await psycopg.AsyncConnection.connect(
            autocommit=True, prepare_threshold=0
        ) as conn:
            if kind == "latency":
                await conn.execute('listen "pgmq.q_bench.INSERT"')
            while not is_over.is_set():
                cursor = await conn.execute(
                    "select msg_id, message from pgmq.read('bench', 30, %s)",
                    (QUANTITY[kind],),
                )
                rows = await cursor.fetchall()
                if kind == "nap":
                    await asyncio.gather(*(nap(message["n"]) for _, message in rows))
                else:
                    for _, message in rows:
                        await handle(message["n"])
                if rows:
                    ids = [row[0] for row in rows]
                    await conn.execute("select pgmq.delete('bench', %s::bigint[])", (ids,))
                    acknowledged()
                elif kind == "latency":
                    started = time.monotonic()
                    async for _ in conn.notifies(timeout=0.2, stop_after=1):
                        pass
                    assert time.monotonic() - started < 5
                else:
                    await asyncio.sleep(0.01)


if __name__ == "__main__":
    main(Pgmq())
