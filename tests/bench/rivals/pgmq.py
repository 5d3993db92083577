"""pgmq: read(100) and delete(bigint[]) on one psycopg connection, prepared.

Naps: read(50), 32 at a time. Latency: the queue notifies without a throttle, and the
worker listens. Producers: send on a pool of connections; bulk: send_batch of 5,000.
pgmq's SQL comes with its package.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources

from bench.rivals.connections import Borrower, Pooled, borrowed, connect, sql
from bench.rivals.driver import Handle, Kind, Payload, main

NAPS = 32
QUANTITY: dict[Kind, int] = {"noop": 100, "nap": 50, "latency": 10}
READ = "select msg_id, message from pgmq.read('bench', 30, %s)"
DELETE = "select pgmq.delete('bench', %s::bigint[])"
SEND = "select pgmq.send('bench', %s::jsonb)"
SEND_BATCH = "select pgmq.send_batch('bench', %s::text[]::jsonb[])"


class Producer(Borrower):
    async def add(self, payload: Payload) -> None:
        async with borrowed(self.connections) as conn:
            await conn.execute(SEND, (json.dumps(payload),))

    async def add_many(self, payloads: list[Payload], priority: int) -> None:
        """It has no priorities."""
        async with borrowed(self.connections) as conn:
            await conn.execute(SEND_BATCH, ([json.dumps(each) for each in payloads],))


class Pgmq(Pooled):
    producer = Producer
    depth = "select count(*) from pgmq.q_bench"
    reset = "truncate pgmq.q_bench"

    async def install(self) -> None:
        await sql("create schema if not exists pgmq")
        await sql(resources.files("pgmq").joinpath("sql/pgmq.sql").read_text())
        await sql("select pgmq.create('bench')")

    @asynccontextmanager
    async def work(
        self, kind: Kind, handle: Handle, acknowledged: Callable[[], None]
    ) -> AsyncIterator[None]:
        if kind == "latency":
            await sql("select pgmq.enable_notify_insert('bench', 0)")
        is_over = asyncio.Event()
        task = asyncio.create_task(self._work(kind, handle, acknowledged, is_over))
        try:
            yield
        finally:
            is_over.set()
            await task

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

        async with await connect() as conn:
            if kind == "latency":
                await conn.execute('listen "pgmq.q_bench.INSERT"')
            while not is_over.is_set():
                rows = await (await conn.execute(READ, (QUANTITY[kind],))).fetchall()
                if kind == "nap":
                    await asyncio.gather(*(nap(message["n"]) for _, message in rows))
                else:
                    for _, message in rows:
                        await handle(message["n"])
                if rows:
                    await conn.execute(DELETE, ([row[0] for row in rows],))
                    acknowledged()
                elif kind == "latency":
                    async for _ in conn.notifies(timeout=0.2, stop_after=1):
                        pass
                else:
                    await asyncio.sleep(0.01)


if __name__ == "__main__":
    main(Pgmq())
