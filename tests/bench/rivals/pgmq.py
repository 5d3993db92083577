"""pgmq: read(100) and delete(bigint[]) on one psycopg connection, prepared.

Jobs that sleep: read(50), 32 at once. Groups: read_grouped_head(100), which is at most one of
each, 32 at once; without create_fifo_index, whose index that statement does not use. Latency: the queue notifies without a throttle, and the
worker listens. Producers: send on a pool of connections; bulk: send_batch of 5,000.
pgmq's SQL comes with its package.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources

from psycopg import AsyncConnection

from bench.rivals.connections import Pooled, connect, sql
from bench.rivals.driver import AT_ONCE, Handle, Kind, Payload, main
from bench.statements import PGMQ

QUANTITY: dict[Kind, int] = {"noop": 100, "sleep": 50, "latency": 10, "groups": 100}
READ = "select msg_id, message from pgmq.read('bench', 30, %s)"
READ_GROUPS = "select msg_id, message from pgmq.read_grouped_head('bench', 30, %s)"
SEND = "select pgmq.send('bench', %s::jsonb)"
SEND_BATCH = "select pgmq.send_batch('bench', %s::text[]::jsonb[])"
SEND_GROUPS = (
    "select pgmq.send_batch('bench', %s::text[]::jsonb[], %s::text[]::jsonb[])"
)


class Pgmq(Pooled):
    async def add(self, conn: AsyncConnection, payload: Payload) -> None:
        await conn.execute(SEND, (json.dumps(payload),))

    async def add_many(
        self, conn: AsyncConnection, payloads: list[Payload], priority: int
    ) -> None:
        """It has no priorities."""
        messages = [json.dumps(each) for each in payloads]
        if "group" not in payloads[0]:
            await conn.execute(SEND_BATCH, (messages,))
            return
        headers = [json.dumps({"x-pgmq-group": each["group"]}) for each in payloads]
        await conn.execute(SEND_GROUPS, (messages, headers))

    async def install(self) -> None:
        await sql("create schema if not exists pgmq")
        await sql(resources.files("pgmq").joinpath("sql/pgmq.sql").read_text())
        await sql("select pgmq.create('bench')")

    async def limit_groups(self) -> None:
        """read_grouped_head needs no setting."""

    @asynccontextmanager
    async def work(
        self, kind: Kind, handle: Handle, acknowledged: Callable[[], None]
    ) -> AsyncIterator[None]:
        if kind == "latency":
            await sql(PGMQ.notify)
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
        gate = asyncio.Semaphore(AT_ONCE)
        read = READ_GROUPS if kind == "groups" else READ

        async def gated(n: int) -> None:
            async with gate:
                await handle(n)

        async with await connect() as conn:
            if kind == "latency":
                await conn.execute(PGMQ.idle)
            while not is_over.is_set():
                rows = await (await conn.execute(read, (QUANTITY[kind],))).fetchall()
                if kind in ("sleep", "groups"):
                    await asyncio.gather(*(gated(message["n"]) for _, message in rows))
                else:
                    for _, message in rows:
                        await handle(message["n"])
                if rows:
                    await conn.execute(PGMQ.complete, ([row[0] for row in rows],))
                    acknowledged()
                elif kind == "latency":
                    async for _ in conn.notifies(timeout=0.2, stop_after=1):
                        pass
                else:
                    await asyncio.sleep(0.01)


if __name__ == "__main__":
    main(Pgmq())
